import http.server
import json
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from eagle3.config import ServerConfig
from eagle3.errors import UserError
from eagle3.serving import cpu, watch
from eagle3.serving import server as servers
from eagle3.serving.client import Client, RequestFailed, RequestRefused, in_order
from eagle3.serving.from_config import get_servers, launches
from eagle3.serving.server import Launch, Server, check_version, command, connect


@pytest.mark.parametrize("ahead", [2, 5])
def test_results_come_in_order_with_bounded_look_ahead(ahead: int) -> None:
    drawn, running, peak = [], 0, 0
    lock = threading.Lock()

    def items():
        for i in range(50):
            drawn.append(i)
            yield i

    def work(i: int) -> int:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        time.sleep(0.05 if i == 0 else 0.001)
        with lock:
            running -= 1
        return i * i

    results = in_order(work, items(), 4, ahead)
    assert next(results) == 0
    assert len(drawn) == 4 * ahead  # however long the first one took
    assert list(results) == [i * i for i in range(1, 50)]
    assert peak <= 4


def test_an_exception_arrives_at_its_items_turn() -> None:
    def work(i: int) -> int:
        if i == 3:
            raise KeyError(i)
        return i

    results = in_order(work, range(100), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError):
        next(results)


@pytest.fixture
def http_server():
    """A server that answers from a list of (status, body)."""
    replies: list[tuple[int, dict | str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = replies.pop(0)
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", replies
        server.shutdown()


OK = {"output_ids": [5], "text": "x", "meta_info": {"finish_reason": {"type": "stop"}}}


def events(*bodies: dict | str) -> str:
    texts = [body if isinstance(body, str) else json.dumps(body) for body in bodies]
    return "".join(f"data: {text}\n\n" for text in texts)


def test_a_streamed_answer_is_its_last_event_and_knows_its_first(
    http_server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle3.serving.client.RETRY_WAITS_S", (0.0, 0.0))
    url, replies = http_server
    going = {"output_ids": [5, 6], "meta_info": {"finish_reason": None}}
    none_yet = {**going, "output_ids": []}
    whole = {**OK, "output_ids": [5, 6, 7]}
    broken = [events(going), events(going, '{"output_ids": [5, 6'), events({"error": {}}), ""]
    for text in broken[:2]:
        replies.append((200, text))
    replies.append((200, events(none_yet, going, whole, "[DONE]")))
    answer = Client(url).generate([1], {}, stream=True)
    assert answer.output_ids == [5, 6, 7] and answer.first_tokens == 2 and answer.finish == "stop"
    assert answer.first_s is not None and 0 < answer.first_s <= answer.latency_s
    replies += [(200, broken[2]), (200, broken[3]), (200, broken[2])]
    with pytest.raises(RequestFailed, match="the stream broke off"):
        Client(url).generate([1], {}, stream=True)
    replies.append((200, events({**OK, "meta_info": {**OK["meta_info"], "completion_tokens": 3}})))
    with pytest.raises(RequestRefused, match="incremental"):
        Client(url).generate([1], {}, stream=True)
    replies.append((200, OK))
    assert Client(url).generate([1], {}).first_s is None


@pytest.mark.parametrize(
    "body",
    [
        "", "<html>", "null", "[]", "{}", '{"error": "x"}', {**OK, "output_ids": None},
        {**OK, "meta_info": None}, {**OK, "meta_info": {"finish_reason": "stop"}},
        "data: {half\n\n" + events(OK), events("null"), events({**OK, "output_ids": None}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_of_another_form_is_tried_again(
    http_server, monkeypatch: pytest.MonkeyPatch, body: dict | str, stream: bool
) -> None:
    monkeypatch.setattr("eagle3.serving.client.RETRY_WAITS_S", (0.0,))
    url, replies = http_server
    good = events(OK) if stream else OK
    replies += [(200, body), (200, good)]
    answer = Client(url).generate([1], {}, stream=stream)
    assert answer.output_ids == [5] and answer.retries == 1
    replies += [(200, body), (200, body)]
    with pytest.raises(RequestFailed, match="no answer of SGLang's|broke off|aborted"):
        Client(url).generate([1], {}, stream=stream)
    replies.append((200, body))
    assert Client(url).trouble() is not None
    replies.append((200, OK))
    assert Client(url).trouble() is None


def test_the_first_token_is_timed_when_it_comes() -> None:
    class Slow(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for event in ({**OK, "meta_info": {"finish_reason": None}}, OK):
                data = events(event).encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                time.sleep(0.5)
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        answer = Client(f"http://127.0.0.1:{server.server_port}").generate([1], {}, stream=True)
        server.shutdown()
    assert answer.first_s is not None and answer.first_s < 0.4 and answer.latency_s > 0.9


def test_a_request_that_the_server_aborts_is_no_answer(http_server) -> None:
    url, replies = http_server
    client = Client(url)
    client.retry_waits_s = (0.0,)

    def aborted(**status: int) -> dict:
        reason = {"type": "abort", "message": "the input is too long", **status}
        return {"output_ids": [5], "meta_info": {"finish_reason": reason, "completion_tokens": 1}}

    error = {"error": {"message": "the input is too long", "code": 400}}
    for refused in (error, aborted(status_code=400)):  # of a stream HTTP's status is 200 by then
        replies[:] = [(200, events(refused, "[DONE]")), (200, events(OK))]
        with pytest.raises(RequestRefused, match="the input is too long"):
            client.generate([1], {}, stream=True)
    for failed in (aborted(status_code=503), aborted(status_code=429), aborted()):
        replies[:] = [(200, events(failed, "[DONE]")), (200, events(OK))]
        assert client.generate([1], {}, stream=True).output_ids == [5]
        assert replies == []
    replies += [(200, aborted()), (200, aborted())]
    with pytest.raises(RequestFailed, match="aborted the request: the input"):
        client.generate([1], {})


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_attempt_is_part_of_the_latency(http_server, stream: bool) -> None:
    url, replies = http_server
    replies += [(500, {}), (200, events(OK) if stream else OK)]
    client = Client(url)
    client.retry_waits_s = (0.1,)
    answer = client.generate([1], {}, stream=stream)
    assert answer.latency_s > 0.1 and answer.retries == 1


def test_server_errors_are_retried(http_server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3.serving.client.RETRY_WAITS_S", (0.0, 0.0))
    url, replies = http_server
    replies += [(500, {}), (503, {}), (200, OK)]
    answer = Client(url).generate([1], {})
    assert answer.output_ids == [5] and answer.finish == "stop"
    replies += [(500, {"error": "boom"})] * 3
    with pytest.raises(RequestFailed, match="boom"):
        Client(url).generate([1], {})


def test_a_refused_request_is_not_repeated(http_server) -> None:
    url, replies = http_server
    replies += [(400, {"error": "too long"}), (200, OK)]
    with pytest.raises(RequestRefused, match="too long"):
        Client(url).generate([1], {})
    assert len(replies) == 1


@pytest.mark.parametrize("status", [401, 404, 408, 429])
def test_what_is_not_about_the_request_is_not_held_against_it(http_server, status: int) -> None:
    """A queue that is full, say: `respond` would put the prompt down as refused for good."""
    url, replies = http_server
    client = Client(url)
    client.retry_waits_s = (0.0,)
    replies += [(status, {"error": "later"}), (200, OK)]
    assert client.generate([1], {}).output_ids == [5]
    replies += [(status, {"error": "later"})] * 2
    with pytest.raises(RequestFailed, match="later") as failed:
        client.generate([1], {})
    assert not isinstance(failed.value, RequestRefused)


def test_a_request_that_takes_too_long_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = Client(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.05)
        client.retry_waits_s = ()
        with pytest.raises(RequestFailed, match=r"server\.timeout_s=0\.05"):
            client.generate([1], {})


def test_a_server_that_wants_another_key_is_told_from_none(http_server) -> None:
    url, replies = http_server
    replies += [(401, {"error": "Unauthorized"})]
    with pytest.raises(UserError, match="HTTP 401.*Unauthorized"):
        connect(url, "wrong")


def test_nothing_at_the_url_is_a_users_mistake() -> None:
    with pytest.raises(UserError, match="no SGLang server answers"):
        connect("http://127.0.0.1:9")


def test_command_line() -> None:
    what = Launch(
        model=Path("m"),
        log=Path("l"),
        args={"tp_size": 2, "skip": True, "no": False, "list": [1, 2]},
    )
    line = command(what, 31000, "triton")
    text = " ".join(line)
    assert "--attention-backend triton" in text and "--tp-size 2 --skip --list 1 2" in text
    assert "--no" not in line and "--model-path m --host 127.0.0.1 --port 31000" in text


@pytest.mark.parametrize("on_cpu", [False, True])
def test_a_servers_command_for_a_shell(on_cpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers.cpu, "needed", lambda: on_cpu)
    what = Launch(model=Path("a model"), log=Path("l"), args={"skip": True}, env={"X": "1 2"})
    *assignments, flags = servers.shell_command(what, "triton").partition("python -m ")
    assignments = shlex.split(assignments[0])
    assert assignments[-1] == "X=1 2"
    assert ("SGLANG_PLUGINS=eagle3_cpu" in assignments) == on_cpu
    assert ("SGLANG_USE_CPU_ENGINE=1" in assignments) == on_cpu
    assert flags.startswith("sglang.launch_server ")
    assert flags.endswith(
        "--model-path 'a model' --host 127.0.0.1 --attention-backend triton --skip"
    )
    assert ("--device cpu" in flags) == on_cpu


@pytest.mark.parametrize("found", ["0.5.13", "0.5.24", "0.6.0"])
def test_untried_versions_are_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "version", lambda _: found)
    with pytest.raises(UserError, match=found):
        check_version()


def start(code: str, log: Path) -> subprocess.Popen:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-u", "-c", code], stdout=output, stderr=output, start_new_session=True
        )


def printed_pid(log: Path) -> int:
    """The number a started process prints first, once it has."""
    deadline = time.monotonic() + 30
    while not log.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    return int(log.read_text())


BUSY = "import time; print('loading', flush=True)\nwhile True: pass"
CHATTY = "import time\nwhile True: print('.', flush=True); time.sleep(0.1)"
GROWING = (
    "import time; x = []\nwhile True: x.append(bytearray(10**7)); print(len(x)); time.sleep(0.02)"
)


@pytest.mark.parametrize(
    ("code", "limits", "reason"),
    [
        ("print('no kernel image'); raise SystemExit(3)", (30, None, None), "the process ended"),
        (CHATTY, (1.5, None, None), "not ready within 2 s|not ready within 1 s"),
        (BUSY, (30, None, 1.0), "no log line for 1 s"),
        (GROWING, (30, 0.2, None), "over the limit of 0.2 GB"),
    ],
)
def test_a_server_that_never_comes_up_is_given_up(
    tmp_path: Path, code: str, limits, reason: str
) -> None:
    log = tmp_path / "log"
    process = start(code, log)
    bounds = watch.Limits(deadline_s=limits[0], memory_gb=limits[1], stall_s=limits[2])
    try:
        with pytest.raises(watch.ServerFailed, match=reason) as failure:
            watch.wait_until(lambda: False, process.pid, log, bounds, poll_s=0.1)
        assert log.read_text().splitlines()[0] in str(failure.value)
    finally:
        watch.end(process.pid)
        process.wait()


def test_end_reaches_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\n"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True)\nprint(c.pid, flush=True)\ntime.sleep(60)"
    )
    log = tmp_path / "log"
    process = start(code, log)
    child = printed_pid(log)
    watch.end(process.pid)
    process.wait()
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def stand_in(monkeypatch: pytest.MonkeyPatch, code: Callable[[Launch, str | None], str]) -> list:
    """Servers that run this code instead of SGLang; returns the backends as they are tried."""
    tried = []

    def spawn(what: Launch, backend: str | None, timeout_s: float) -> Server:
        tried.append(backend)
        url = "http://127.0.0.1:9"
        process = start(code(what, backend), what.log)
        return Server(url=url, client=Client(url), process=process, log=what.log, backend=backend)

    monkeypatch.setattr(servers, "_spawn", spawn)
    return tried


@pytest.mark.parametrize(
    ("code", "limits", "reason"),
    [
        ("print('no kernel image'); raise SystemExit(3)", {}, "the process ended"),
        (BUSY, {"stall_s": 1.0}, "no log line for 1 s"),
        (CHATTY, {"deadline_s": 1.5}, "not ready within 2 s"),
        (GROWING, {"memory_gb": 0.2}, "over the limit of 0.2 GB"),
    ],
)
def test_the_next_backend_is_tried_and_the_one_that_works_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, limits: dict, reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The first backend's server loops, grows or dies and never answers; the second one's does."""
    tried = stand_in(monkeypatch, lambda _, backend: code if backend == "fa3" else CHATTY)
    monkeypatch.setattr(Client, "answers", lambda _: tried[-1] == "triton")
    bounds = {"deadline_s": 30, "memory_gb": None, "stall_s": None, **limits}
    what = Launch(
        model=Path("m"), log=tmp_path / "log", backends=["fa3", "triton"],
        limits=watch.Limits(**bounds),
    )  # fmt: skip
    before = {child.pid for child in psutil.Process().children()}
    with servers.launch(what) as (server,):
        assert tried == ["fa3", "triton"] and server.backend == "triton"
        assert not server.ended()
        children = psutil.Process().children()
        alive = {c.pid for c in children if c.status() != psutil.STATUS_ZOMBIE}
        assert alive - before == {server.process.pid}
    assert server.ended()
    assert "attention backend fa3" in caplog.text and reason in caplog.text


def test_all_failures_are_told_if_no_backend_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = stand_in(monkeypatch, lambda _, backend: f"print('backend {backend} is broken')")
    what = Launch(model=Path("m"), log=tmp_path / "log", backends=["fa3", "triton"])
    with pytest.raises(watch.ServerFailed) as failure, servers.launch(what):
        pass
    assert tried == ["fa3", "triton"]
    assert "backend fa3 is broken" in str(failure.value)
    assert "backend triton is broken" in str(failure.value)
    assert isinstance(failure.value, UserError) and "`server`: args" in str(failure.value)


def test_backends_of_gpus_are_refused_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "needed", lambda: True)
    config = ServerConfig(backends=["fa3", "triton"])
    with (
        pytest.raises(UserError, match=r"\['fa3', 'triton'\] .* no GPU: set server=cpu"),
        get_servers(config, Path("m"), tmp_path / "log"),
    ):
        pass


@pytest.mark.parametrize(
    ("gpus", "first", "begins"),
    [(8, None, [None, 2, 4]), (5, None, [None, 2, None]), (8, 3, [3, 5, 3]), (0, 0, [0, 0, 0])],
)
def test_replicas_have_places_of_their_own_while_there_are_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    gpus: int,
    first: int | None,
    begins: list[int | None],
) -> None:
    seen: list[Launch] = []
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    stand_in(monkeypatch, lambda what, _: seen.append(what) or CHATTY)
    monkeypatch.setattr(Client, "answers", lambda _: True)
    args = {"tp_size": 2} | ({} if first is None else {"base_gpu_id": first})
    config = ServerConfig(port=4000, args=args)
    envs = [{"X": "a"}, {"X": "b"}, {"X": "c"}]
    with get_servers(config, Path("m"), tmp_path / "s.log", envs=envs) as found:
        assert len(found) == 3
    assert [w.port for w in seen] == [4000, 4001, 4002]
    assert [w.env["X"] for w in seen] == ["a", "b", "c"]
    assert [w.args.get("base_gpu_id") for w in seen] == begins
    assert len({w.log for w in seen}) == 3


@pytest.mark.parametrize(
    ("args", "second"),
    [
        ({}, 1),
        ({"tp": 4}, 4),
        ({"tensor_parallel_size": 2, "pp_size": 2}, 4),
        ({"tp_size": 2, "dp_size": 3}, 6),
        ({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True}, 4),
    ],
)
def test_a_server_has_as_many_gpus_as_its_flags_take(
    monkeypatch: pytest.MonkeyPatch, args: dict[str, object], second: int
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 16)
    found = launches(ServerConfig(args=args), Path("m"), Path("s.log"), envs=[{}, {}])
    assert [what.args.get("base_gpu_id") for what in found] == [None, second]


def test_a_server_does_not_outlive_a_killed_client(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys, time\nfrom eagle3.serving import watch\n"
        "c = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'],"
        " start_new_session=True, preexec_fn=watch.die_with_parent)\n"
        "print(c.pid, flush=True)\ntime.sleep(60)"
    )
    log = tmp_path / "log"
    process = start(code, log)
    child = psutil.Process(printed_pid(log))
    process.kill()
    process.wait()
    gone, _ = psutil.wait_procs([child], timeout=5)
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_a_drafters_norms_must_be_known_to_the_installed_sglang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.require_drafter_flags(["norm_before_fc", "fc_norm", "norm_output"])  # the real one
    models = tmp_path / "sglang" / "srt" / "models"
    models.mkdir(parents=True)
    (models / "llama_eagle3.py").write_text('getattr(config, "fc_norm", None)')
    (tmp_path / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    servers.require_drafter_flags(["fc_norm"])
    with pytest.raises(UserError, match=r"does not know norm_before_fc .*draft\.fc_norm=true"):
        servers.require_drafter_flags(["norm_before_fc", "fc_norm"])
