"""Tool calls in a model's text: the families' formats, and a parser for each."""
