"""docs/design.md says which functions and kernels decode one token."""

from tests.trace_token import PAGE, written
from tests.without_gpu import run_without_gpu


def test_the_page_says_what_decodes_a_token():
    """After a change that is meant: `python -m tests.trace_token` writes the page again."""
    assert run_without_gpu("trace_token.py", "--json") == written(PAGE.read_text())
