"""The command line: parser, shared options, chat input. Imports no torch: --help is fast."""
