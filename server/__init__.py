"""An OpenAI-compatible HTTP server for one session. serve.py is its command."""

LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")  # addresses that need no API key
