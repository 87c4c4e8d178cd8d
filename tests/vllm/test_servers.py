"""Rollouts by servers: how prompts are spread over them, by servers that only look like vLLM's."""

import contextlib
import json
import threading
import time
from base64 import b64decode
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from engines import CPU
from processes import one_layer, ranks
from safetensors.torch import load

from pspo import distributed as dist
from pspo.config import DistributedConfig, ModelConfig, TrainConfig
from pspo.model import load_policy
from pspo.rollout import Sampling
from pspo.rollout.engine import EngineError, find_engine
from pspo_vllm.servers import Servers
from pspo_vllm.vllm import weights_of_files

pytestmark = pytest.mark.usefixtures("here")


class Server(ThreadingHTTPServer):
    """Looks like a vLLM server: what it draws depends on the seed alone, and it keeps the weights that it gets.

    Attributes:
        before: called with the path before each answer; what it raises is the server's failure.
        seeds: those for which it was to draw.
    """

    daemon_threads = True

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Routes)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.version, self.updating, self.weights, self.seeds = "default", False, {}, []
        self.vllm, self.finish_reason, self.before = "0.32.0", "stop", lambda path: None
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()


class Routes(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        server, path = self.server, self.path.partition("?")[0]
        try:
            server.before(path)
            answer = {"version": server.vllm} if path == "/version" else self.answer(server, path, body)
            status = 200
        except RuntimeError as error:
            answer, status = {"error": str(error)}, 500
        except KeyError:
            answer, status = {"detail": "Not Found"}, 404
        self.send_response(status)
        self.end_headers()
        with contextlib.suppress(OSError):  # who asked no longer waits
            self.wfile.write(json.dumps(answer).encode())

    do_GET = do_POST

    def answer(self, server: Server, path: str, body: dict) -> dict:
        if path == "/inference/v1/generate":
            values = body["sampling_params"]
            server.seeds.append(values["seed"])
            return {"choices": [self.completion(values["seed"], i) for i in reversed(range(values["n"]))]}
        updating = {"/start_weight_update": False, "/update_weights": True, "/finish_weight_update": True}
        if path in updating and server.updating != updating[path]:
            raise RuntimeError("an update is active" if server.updating else "no update is active")
        if path == "/update_weights":
            server.weights |= load(b64decode(body["update_info"]["safetensors"]))
        if path in updating:
            server.updating = path != "/finish_weight_update"
        server.version = body.get("new_version", server.version)
        return {route: {} for route in ("/pause", "/update_weight_version", "/resume", *updating)}[path]

    def completion(self, seed: int, index: int) -> dict:
        ids = [seed % 1000, index, *range(seed % 3)]
        versions = [{"version": version, "start": 0, "end": len(ids)} for version in self.server.version.split("+")]
        logprobs = {"content": [{"token_id": token, "logprob": -token / 8} for token in ids]}
        choice = {"index": index, "token_ids": ids, "finish_reason": self.server.finish_reason}
        return choice | {"logprobs": logprobs, "weight_versions": versions}

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    both = [Server(), Server()]
    yield both
    for server in both:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def policy():
    return load_policy(ModelConfig(one_layer()), CPU)


@contextlib.contextmanager
def engine_of(servers: list[Server], timeout: float = 60.0) -> Iterator[Servers]:
    engine = Servers([server.url for server in servers], timeout)
    engine.start(TrainConfig(), 256, CPU)
    yield engine
    engine.close()


def drawn_by(engine: Servers, prompts: int = 6) -> tuple[list[list[int]], list[list[float]]]:
    torch.manual_seed(5)
    asked = ([[3, 4]] * prompts, Sampling(stop_ids=(1,), pad_id=0), 2)
    engine.begin(*asked)
    ids, logprobs = engine.complete(*asked)
    return ids.tolist(), logprobs.tolist()


def expected(prompts: int = 6) -> tuple[list[list[int]], list[list[float]]]:
    torch.manual_seed(5)
    seeds = torch.randint(2**31, (prompts,)).tolist()
    rows = [[seed % 1000, index, *range(seed % 3)] for seed in seeds for index in range(2)]
    padded = [row + [0] * (max(map(len, rows)) - len(row)) for row in rows]
    return padded, [[-token / 8 for token in row] for row in padded]


def test_prompts_are_spread_and_their_order_is_kept(servers, policy):
    servers[0].before = lambda path: path.endswith("generate") and time.sleep(0.3)  # it answers last
    with engine_of(servers) as engine:
        engine.push(policy, 0)
        assert drawn_by(engine) == expected()
    assert [len(server.seeds) for server in servers] == [3, 3]


def test_what_is_pushed_to_servers_are_the_weights_of_files(servers, policy):
    with engine_of(servers) as engine:
        engine.push(policy, 3)
        names = {server.version for server in servers}
        assert names == {engine.version}
        assert engine.version.endswith("-3")
        for name, weight in [named for layer in weights_of_files(policy) for named in layer.items()]:
            assert all(torch.equal(server.weights[name], weight) for server in servers)
        for server in servers:
            server.weights = {}
        engine.push(policy, 3)  # they have it
        assert not servers[0].weights
    with engine_of(servers) as other:
        other.push(policy, 3)  # another process's third version may be another one
        assert engine.version != other.version == servers[0].version


def test_servers_are_checked_before_anything_is_loaded(servers):
    servers[1].vllm = "0.31.2"
    gone, old = "http://127.0.0.1:1", servers[1].url
    for urls, message in (([], "urls is empty"), ([gone], f"{gone} does not answer"), ([old], f"{old} runs .*0.31.2")):
        with pytest.raises(ValueError, match=f"^--rollout.engine pspo_vllm.Servers: {message}"):
            find_engine({"class_path": "pspo_vllm.Servers", "init_args": {"urls": urls}})


def die(path: str) -> None:
    if path.endswith("generate"):
        raise RuntimeError("EngineCore has died")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"before": die}, "answers /inference/v1/generate by 500"),
        ({"before": lambda path: path.endswith("generate") and time.sleep(2)}, "does not answer"),
        ({"version": "default"}, "drew with weights default, not"),  # it was restarted
        ({"version": "VERSION+other"}, "drew with weights"),  # it got others meanwhile
        ({"finish_reason": "abort"}, r"of 128 tokens \(abort\)"),
    ],
)
def test_a_server_that_fails_ends_the_drawing(servers, policy, fault, message):
    with engine_of(servers, timeout=0.7) as engine:
        engine.push(policy, 0)
        for name, value in fault.items():
            value = value.replace("VERSION", engine.version) if isinstance(value, str) else value
            setattr(servers[0], name, value)
        with pytest.raises(EngineError, match=f"^{servers[0].url} .*{message}"):
            drawn_by(engine)


def test_of_several_ranks_one_pushes_and_all_draw_or_raise(servers, policy):
    def draw() -> None:
        dist.init("fsdp2", 60.0)
        sharded = load_policy(ModelConfig(one_layer()), CPU, DistributedConfig("fsdp2"))
        with engine_of(servers) as engine:
            if dist.is_main():
                engine.urls.append("http://127.0.0.1:1")
            with pytest.raises(EngineError, match=r"127\.0\.0\.1:1 does not answer"):
                engine.push(sharded, 0)
            engine.urls = engine.urls[:2]
            engine.push(sharded, 0)
            assert drawn_by(engine) == expected()

    assert ranks(draw) == [0, 0]
    assert len({server.version for server in servers}) == 1
    for name, weight in [named for layer in weights_of_files(policy) for named in layer.items()]:
        assert all(torch.equal(server.weights[name], weight) for server in servers)
    assert [len(server.seeds) for server in servers] == [6, 6]
