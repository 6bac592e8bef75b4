"""Requests to an SGLang server: one at a time or many with bounded concurrency, with retries."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import requests

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")
RETRY_WAITS_S = (0.5, 2.0, 8.0)


class RequestFailed(RuntimeError):
    """The server refused a request, or stayed unreachable through all retries."""


class RequestRefused(RequestFailed):
    """The server found fault with the request itself (HTTP 4xx): repeating it would not help."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """What /generate returned.

    output_ids: generated token ids. finish: "stop", "length" or "abort". latency_s: seconds from
    request to answer, on the client's clock. meta: the server's `meta_info`.
    """

    output_ids: list[int]
    finish: str
    latency_s: float
    text: str = ""
    meta: dict[str, Any] = field(default_factory=dict)


class Client:
    """Talks to one server. Safe to share between threads."""

    def __init__(self, url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.retry_waits_s: tuple[float, ...] = RETRY_WAITS_S
        self._session = requests.Session()
        self._session.trust_env = False  # a proxy has no business between us and the server
        adapter = requests.adapters.HTTPAdapter(pool_maxsize=256)
        self._session.mount("http://", adapter)
        self._session.mount("https://", adapter)
        if api_key:
            self._session.headers["Authorization"] = f"Bearer {api_key}"

    def answers(self) -> bool:
        """Whether the server generates a token right now (a port that is open is not enough)."""
        try:
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
            return self._session.post(f"{self.url}/generate", json=body, timeout=30).ok
        except requests.RequestException:
            return False

    def info(self) -> dict[str, Any]:
        """The server's arguments and state.

        Raises:
            RequestFailed: it gives none, or does not answer.
        """
        for path in ("/server_info", "/get_server_info"):
            try:
                reply = self._session.get(self.url + path, timeout=30)
            except requests.RequestException as error:
                raise RequestFailed(f"{self.url}{path}: {type(error).__name__}: {error}") from error
            if reply.ok:
                return reply.json()
        raise RequestFailed(f"{self.url} gives no server info: HTTP {reply.status_code}")

    def generate(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        rid: str | None = None,
        token_ids_logprob: list[int] | None = None,
    ) -> Answer:
        """Generate after a prompt of token ids.

        Args:
            token_ids_logprob: tokens whose log-probability to report at each generated position, in
                `meta["output_token_ids_logprobs"]` as (log-probability, id, text).

        Raises:
            RequestRefused: HTTP 4xx, at once.
            RequestFailed: HTTP 5xx and connection errors, after the last retry.
        """
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling}
        if rid is not None:
            body["rid"] = rid
        if token_ids_logprob is not None:
            body |= {"return_logprob": True, "token_ids_logprob": token_ids_logprob}
        start = time.perf_counter()
        data = self._post("/generate", body)
        meta = data["meta_info"]
        return Answer(
            output_ids=data["output_ids"],
            finish=(meta.get("finish_reason") or {}).get("type", "unknown"),
            latency_s=time.perf_counter() - start,
            text=data.get("text", ""),
            meta=meta,
        )

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        for attempt, pause in enumerate((*self.retry_waits_s, None)):
            try:
                reply = self._session.post(self.url + path, json=body, timeout=self.timeout_s)
                if reply.ok:
                    return reply.json()
                problem = f"HTTP {reply.status_code}: {reply.text[:300]}"
                if reply.status_code < 500:
                    raise RequestRefused(f"{self.url}{path}: {problem}")
            except requests.RequestException as error:
                problem = f"{type(error).__name__}: {error}"
            if pause is None:
                break
            log.warning("%s%s: %s; retry %d", self.url, path, problem, attempt + 1)
            time.sleep(pause)
        raise RequestFailed(f"{self.url}{path}: {problem}")


def in_order(
    work: Callable[[T], R], items: Iterable[T], concurrency: int, ahead: int = 2
) -> Generator[R]:
    """Run `work` on items, at most `concurrency` at a time; yield the results in the items' order.

    At most ahead * concurrency items are drawn before the result being waited for is there, so
    memory stays bounded however slow one item is; where items differ by more than that factor,
    threads stand idle. An exception is raised at its item's turn; what is under way then is waited
    for, what has not started is dropped.
    """
    source = iter(items)
    with ThreadPoolExecutor(max_workers=concurrency) as pool:
        window: deque[Future[R]] = deque()
        try:
            while True:
                for item in itertools.islice(source, ahead * concurrency - len(window)):
                    window.append(pool.submit(work, item))
                if not window:
                    return
                yield window.popleft().result()
        finally:
            for future in window:
                future.cancel()
