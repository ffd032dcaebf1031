"""An HTTP server for one session, with the APIs of OpenAI and Anthropic. Command: serve.py."""
