"""An HTTP server for one session, with the APIs of OpenAI and Anthropic. Command: serve.py."""

from cli.serve_options import LOCAL_HOSTS

__all__ = ["LOCAL_HOSTS"]
