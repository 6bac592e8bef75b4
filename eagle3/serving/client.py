"""Requests to an SGLang server: one at a time or many with bounded concurrency, with retries."""

from __future__ import annotations

import itertools
import json
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
REFUSED = {400, 413, 422}
"""HTTP statuses that say something about the request; others of 4xx are about who asks (401, 403)
or when (408, 429)."""


NO_ANSWER = (ValueError, KeyError, TypeError, AttributeError)
"""What a reply of another form makes its readers raise."""


class RequestFailed(RuntimeError):
    """The server refused a request, or stayed unreachable through all retries."""


class RequestRefused(RequestFailed):
    """The server found fault with the request itself: repeating it would not help."""


@dataclass(kw_only=True, slots=True)
class Answer:
    """What /generate returned.

    output_ids: generated token ids. finish: "stop" or "length". latency_s: seconds from request to
    answer, on the client's clock. meta: the server's `meta_info`. first_s: seconds to the first
    tokens, `first_tokens` of them; None if the answer was not streamed. retries: attempts that
    failed before; their time is in both.
    """

    output_ids: list[int]
    finish: str
    latency_s: float
    text: str = ""
    meta: dict[str, Any] = field(default_factory=dict)
    first_s: float | None = None
    first_tokens: int = 0
    retries: int = 0


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
        return self.trouble() is None

    def trouble(self) -> str | None:
        """Why the server does not generate a token right now; None if it does."""
        body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        try:
            reply = self._session.post(f"{self.url}/generate", json=body, timeout=30)
        except requests.RequestException as error:
            return f"{type(error).__name__}: {error}"
        if not reply.ok:
            return f"HTTP {reply.status_code}: {reply.text[:300]}"
        try:
            _answer(reply.json(), 0.0)
        except NO_ANSWER:
            return f"what answers is not SGLang: {reply.text[:100]!r}"
        except (RequestFailed, requests.ConnectionError) as error:
            return str(error)
        return None

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
                try:
                    return dict(reply.json())
                except NO_ANSWER as error:
                    raise RequestFailed(
                        f"{self.url}{path} is not SGLang's server info: {reply.text[:100]!r}"
                    ) from error
        raise RequestFailed(f"{self.url} gives no server info: HTTP {reply.status_code}")

    def generate(
        self,
        input_ids: list[int],
        sampling: dict[str, Any],
        rid: str | None = None,
        token_ids_logprob: list[int] | None = None,
        stream: bool = False,
    ) -> Answer:
        """Generate after a prompt of token ids.

        Args:
            stream: have the tokens sent as they come, to know when the first one did.
            token_ids_logprob: tokens whose log-probability to report at each generated position, in
                `meta["output_token_ids_logprobs"]` as (log-probability, id, text).

        Raises:
            RequestRefused: an HTTP status of REFUSED, also one that a stream ends with, or a stream
                of increments; at once.
            RequestFailed: another HTTP status, a connection error or a request that the server
                aborted, after the last retry.
        """
        body: dict[str, Any] = {"input_ids": input_ids, "sampling_params": sampling}
        if rid is not None:
            body["rid"] = rid
        if token_ids_logprob is not None:
            body |= {"return_logprob": True, "token_ids_logprob": token_ids_logprob}
        if stream:
            body["stream"] = True
        read = _streamed if stream else _whole
        return self._post("/generate", body, read)

    def _post(
        self, path: str, body: dict[str, Any], read: Callable[[requests.Response, float], Answer]
    ) -> Answer:
        start = time.perf_counter()  # failed attempts and waits are part of the latency
        for attempt, pause in enumerate((*self.retry_waits_s, None)):
            try:
                with self._session.post(
                    self.url + path, json=body, timeout=self.timeout_s, stream="stream" in body
                ) as reply:
                    if reply.ok:
                        try:
                            answer = read(reply, start)
                        except NO_ANSWER as error:
                            raise requests.ConnectionError(
                                f"what came is no answer of SGLang's ({error!r})"
                            ) from error
                        answer.retries = attempt
                        return answer
                    text = reply.text[:300]
                problem = f"HTTP {reply.status_code}: {text}"
                if reply.status_code in REFUSED:
                    raise RequestRefused(f"{self.url}{path}: {problem}")
            except requests.Timeout as error:
                problem = f"{type(error).__name__}: no answer in server.timeout_s={self.timeout_s}"
            except requests.RequestException as error:
                problem = f"{type(error).__name__}: {error}"
            if pause is None:
                break
            log.warning("%s%s: %s; retry %d", self.url, path, problem, attempt + 1)
            time.sleep(pause)
        raise RequestFailed(f"{self.url}{path}: {problem}")


def _whole(reply: requests.Response, start: float) -> Answer:
    """Of a reply that comes in one piece."""
    return _answer(reply.json(), time.perf_counter() - start)


def _streamed(reply: requests.Response, start: float) -> Answer:
    """Of server-sent events, each with all tokens so far.

    Only the first and the last are looked into: at high concurrency the others would take up the
    client's time.
    """
    first, last, first_s = None, b"", 0.0
    # a piece is what came together, however large it may be: an event is seen as soon as it is here
    for line in reply.iter_lines(chunk_size=1 << 20):
        if not line.startswith(b"data: ") or line == b"data: [DONE]":
            continue
        last = line[len(b"data: ") :]
        if first is None:
            found = json.loads(last)
            if found.get("output_ids"):
                first, first_s = found, time.perf_counter() - start
    end = time.perf_counter() - start
    try:
        data = json.loads(last)
        error = data.get("error")
        ended = error is None and data["meta_info"]["finish_reason"] is not None
    except (ValueError, KeyError):  # nothing came, or half an event
        error, ended = None, False
    if error and isinstance(error, dict):
        raise _aborted(error.get("code"), error.get("message"))
    if not ended:
        raise requests.ConnectionError(f"the stream broke off: {last[:300]!r}")
    answer = _answer(data, end)
    if len(answer.output_ids) != data["meta_info"].get("completion_tokens", len(answer.output_ids)):
        raise RequestRefused(
            "the server streams tokens in increments; it must run without "
            "--incremental-streaming-output"
        )
    if first is not None:
        answer.first_s, answer.first_tokens = first_s, len(first["output_ids"])
    return answer


def _aborted(status: int | None, message: str | None) -> Exception:
    """What to raise for a request that the server ended, in a stream with the status it would have
    had otherwise."""
    told = f"the server aborted the request: {message}"
    if status in REFUSED:
        return RequestRefused(told)
    return requests.ConnectionError(told)


def _answer(data: dict[str, Any], seconds: float) -> Answer:
    meta = data["meta_info"]
    reason = meta.get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise _aborted(reason.get("status_code"), reason.get("message"))
    return Answer(
        output_ids=list(data["output_ids"]),
        finish=reason.get("type", "unknown"),
        latency_s=seconds,
        text=data.get("text", ""),
        meta=meta,
    )


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
