"""A server in the test's process: one thread decodes, another runs HTTP."""

import threading
from pathlib import Path

import pytest
import torch

REASON = "the server's tests need it: pip install 'moe-fast[test]'"
PACKAGES = "httpx", "openai", "starlette", "uvicorn", "pydantic", "prometheus_client"
httpx, openai, *_ = (pytest.importorskip(name, reason=REASON) for name in PACKAGES)

from checkpoint import Checkpoint  # noqa: E402
from generate import open_session  # noqa: E402
from serve import bind, build_parser, check_options, open_speculation  # noqa: E402
from server.app import AppSettings, make_app, make_limits, run_server  # noqa: E402
from server.scheduler import Decoder, Scheduler  # noqa: E402
from server.tokenizing import TokenizerPool  # noqa: E402
from tokenizer import load_tokenizer  # noqa: E402


class LocalServer:
    """A server of a checkpoint in fp32 on the CPU. Close it."""

    def __init__(
        self, directory: Path, length: int, options=(), workers: int = 1, pool=None, **settings
    ):
        """options: of serve.py. settings: of AppSettings, and max_queue and time_limit.

        pool: one of another server of the same directory, which closes it.
        """
        options = build_parser().parse_args(["--dtype", "fp32", *options])
        check_options(options)
        checkpoint, device = Checkpoint(directory), torch.device("cpu")
        options.max_batch = batch = options.max_batch or (1 if options.offload else 8)
        self.session = open_session(options, checkpoint, device, length, batch)
        self.tokenizer = load_tokenizer(directory)
        max_queue, time_limit = settings.pop("max_queue", 256), settings.pop("time_limit", 600.0)
        self.scheduler = Scheduler(max_queue, time_limit, batch, "tiny")
        speculation = open_speculation(options, checkpoint, self.session)
        self.decoder = Decoder(self.session, self.tokenizer, self.scheduler, speculation)
        self.decoder.prepare()
        self.limits = make_limits(self.session, self.tokenizer)
        listener, ready = bind("127.0.0.1", 0), threading.Event()
        defaults = {"max_body": 100_000, "max_requests": 2 * max_queue + 64}
        app_settings = AppSettings("tiny", self.limits, **defaults | settings)
        self.pool = pool or TokenizerPool(directory, length, workers=workers)
        self.owns_pool = pool is None
        app = make_app(self.scheduler, self.pool, app_settings)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        arguments = self.decoder, app, listener, ready.set
        self.thread = threading.Thread(target=run_server, args=arguments)
        self.thread.start()
        assert ready.wait(20)
        key = app_settings.api_key or "none"
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60
        )

    def complete(self, prompt, **options):
        return self.client.completions.create(
            model="any", prompt=prompt, **{"max_tokens": 12, **options}
        )

    def chat(self, messages, **options):
        return self.client.chat.completions.create(model="any", messages=messages, **options)

    def post(self, path="completions", **options):
        return httpx.post(f"{self.url}/v1/{path}", timeout=60, **options)

    def close(self):
        self.scheduler.close()
        self.thread.join(20)
        if self.owns_pool:
            self.pool.close()
        assert not self.thread.is_alive()
