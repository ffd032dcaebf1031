"""The chat page's files, as the server sends them."""

from pathlib import Path

from starlette.responses import FileResponse

FOLDER = Path(__file__).with_name("page")
# Paths below /page/ -> files. A name that is not here is not found: no path leads elsewhere.
PAGE_FILES = {
    path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.is_file()
}
PAGE_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
PAGE_HEADERS = {
    # Only the server's own files: text of the model can neither run a script nor load an image.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; "
    "connect-src 'self'; img-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Frame-Options": "DENY",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",  # a new version's files belong together
}


def page_type(name: str) -> str:
    """Return the media type of a file of the page."""
    return PAGE_TYPES.get(PAGE_FILES[name].suffix, "text/plain")


def page_response(name: str) -> FileResponse:
    """Return a file of the page. Raises KeyError for another name."""
    return FileResponse(PAGE_FILES[name], media_type=page_type(name), headers=PAGE_HEADERS)
