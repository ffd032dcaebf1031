"""An HTTP server with the APIs of OpenAI and Anthropic, for one session. serve.py is its command."""

from cli.serve_options import LOCAL_HOSTS

__all__ = ["LOCAL_HOSTS"]
