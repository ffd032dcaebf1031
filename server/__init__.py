"""An OpenAI-compatible HTTP server for one session. serve.py is its command."""

from cli.serve_options import LOCAL_HOSTS

__all__ = ["LOCAL_HOSTS"]
