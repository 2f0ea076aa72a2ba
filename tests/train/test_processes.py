"""Several processes train as one: the same tokens, the same curve, one folder."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from clearhead.errors import ClearheadError
from clearhead.optim import build_optimizer
from clearhead.train import checkpoint, train
from clearhead.train.parallel import dealt_among, own_part
from clearhead.train.world import World
from tests.cli.conftest import call, refusal

from . import spread as program

PROGRAM = Path(program.__file__)
FSDP = {"parallel": "fsdp"}
V1 = {"name": "differential"}
ORTHO = {**FSDP, "optimizer": "orthoadam"}
# What two processes do, one after the other: their outputs tell them apart.
SHORT = {"tokens": 4 * 32}
REQUESTS = {
    "ddp": {},
    "fsdp": {"config": FSDP},
    "muon": {"config": {**FSDP, **SHORT, "optimizer": "muon"}},
    "orthoadam": {"model": V1, "config": {**ORTHO, "accumulation": 2, "tokens": 8 * 32}},
    "unlabelled": {"unlabelled": True, "config": {"accumulation": 2, "tokens": 8 * 32}},
    "bf16": {"config": {**FSDP, "precision": "bf16", "checkpointing": "blocks"}},
    "from-one": {"config": ORTHO, "resume": True},
    "dropout": {"model": {"attention_dropout": 0.1}, "config": FSDP},
    "stopped": {
        "model": {"attention_dropout": 0.1}, "config": FSDP, "events": {"1": {"6": "stop"}},
    },
    "to-one": {"model": V1, "config": ORTHO, "events": {"1": {"6": "stop"}}},
    "nan": {"nan_in": 1},
    "full": {"config": FSDP, "full_in": 1, "room": 30_000},
    "differ": {"config_of": {"1": {"learning_rate": 0.1}}},
    "indivisible": {"config": {"batch_size": 3}},
}  # fmt: skip

# The steps of a run that is stopped as batch 6 is read, for step 7, while step 6 may still run.
AT_BATCH_6 = (6, 7)


def start(warm, folder, size, requests):
    """Start the program of requests in `size` processes, as torchrun does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    words = PROGRAM, folder, json.dumps(requests)
    return [warm.start(*words, env=os.environ | place) for place in ranks]


def answers(warm, folder, size, requests):
    """What each process saw, by output."""
    for done in [process.wait() for process in start(warm, folder, size, requests)]:
        assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((folder / f"answers-{rank}.json").read_text()) for rank in range(size)]


def by_one(tiny, output, request, resume=False, **events):
    """The losses of one process that does as a request says, without its faults."""
    losses = program.Losses()
    config = {key: value for key, value in request.get("config", {}).items() if key != "parallel"}
    model, config = program.make_model(**request.get("model", {})), tiny.make_config(**config)
    batches = program.Batches({**request, "events": events}, 0, output)
    train(model, batches, config, output=output, resume=resume, callbacks=[losses])
    return losses.lines


@pytest.fixture(scope="module")
def hanging(warm, tmp_path_factory):
    """The process that waits 8 seconds for another, which hangs; others work meanwhile."""
    request = {"timeout": 8, "config": SHORT, "events": {"1": {"1": "hang"}}, "output": "run"}
    waiting, hung = start(warm, tmp_path_factory.mktemp("hanging"), 2, [request])
    yield waiting
    os.kill(hung.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def two(tiny, warm, hanging, tmp_path_factory):
    """The folder of two processes, and by output what each saw."""
    folder = tmp_path_factory.mktemp("two")
    by_one(tiny, folder / "from-one", REQUESTS["from-one"], **{"0": {"6": "stop"}})
    requests = [{"output": name, **request} for name, request in REQUESTS.items()]
    requests += [{**requests[8], "events": {}, "resume": True}, {"output": "own loops"}]
    found = answers(warm, folder, 2, requests)
    names = [*REQUESTS, "resumed", "own loops"]
    return folder, [dict(zip(names, one, strict=True)) for one in found]


@pytest.mark.parametrize("name", ["ddp", "fsdp", "muon", "orthoadam", "unlabelled"])
def test_two_processes_have_the_losses_of_one(tiny, two, tmp_path, name):
    ours = two[1][0][name]["losses"]
    theirs = by_one(tiny, tmp_path / name, REQUESTS[name])
    assert len(ours) == (12 if name in ("ddp", "fsdp") else 4)
    # Muon's products are bfloat16, and their sums are of other parts.
    assert ours == pytest.approx(theirs, abs=5e-4 if name == "muon" else 2e-5)
    assert two[1][1][name]["losses"] == []  # callbacks hear of it in the first process alone
    lines = (two[0] / name / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == ours
    assert json.loads((two[0] / name / "run.json").read_text())["processes"] == 2


def test_orthoadam_in_loops_of_ones_own_is_that_of_one_process(two):
    for process in two[1]:
        assert len(process["own loops"]["off"]) == 8
        assert all(off < 2e-6 for off in process["own loops"]["off"].values())
        first, second = process["own loops"]["errors"]
        assert "not finite" in first
        assert "rotates whole columns" in second


def test_a_sharded_run_gives_an_ordinary_folder_and_rounding_stays_near_it(two):
    """Weights in bfloat16 and recomputed blocks."""
    exact, rounded = (two[1][0][name]["losses"] for name in ("fsdp", "bf16"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, abs=2e-2)
    found = AutoModelForCausalLM.from_pretrained(two[0] / "fsdp" / "final")
    assert type(found).__name__ == "LlamaForCausalLM"
    other = AutoModelForCausalLM.from_pretrained(two[0] / "ddp" / "final")
    for ours, theirs in zip(found.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_a_signal_to_one_process_stops_both_and_the_resumed_curve_is_the_unbroken_one(two):
    first, second = two[1]
    assert first["stopped"]["steps"] == second["stopped"]["steps"]
    assert first["stopped"]["steps"] in AT_BATCH_6
    assert first["stopped"]["losses"] + first["resumed"]["losses"] == first["dropout"]["losses"]


def test_a_run_of_one_process_goes_on_in_two(tiny, two, tmp_path):
    theirs = by_one(tiny, tmp_path / "unbroken", REQUESTS["from-one"])
    losses = two[1][0]["from-one"]["losses"]
    assert 12 - len(losses) in AT_BATCH_6
    assert losses == pytest.approx(theirs[-len(losses) :], abs=2e-5)


def test_a_run_of_two_processes_goes_on_in_one(tiny, two, tmp_path):
    request = REQUESTS["to-one"]
    shutil.copytree(two[0] / "to-one", tmp_path / "run")
    before = two[1][0]["to-one"]["losses"]
    after = by_one(tiny, tmp_path / "run", request, resume=True)
    unbroken = by_one(tiny, tmp_path / "unbroken", request)
    assert before + after == pytest.approx(unbroken, abs=2e-5)


def test_a_checkpoint_of_two_is_read_by_one_bit_for_bit_and_holds_no_pickle(tiny, two):
    saved = checkpoint.newest(two[0] / "fsdp").iterdir()
    assert {file.suffix for file in saved} == {".json", ".safetensors"}
    path = checkpoint.newest(two[0] / "to-one")
    model = program.make_model(**V1)
    config = tiny.make_config(optimizer="orthoadam")
    optimizer = build_optimizer(model, config)
    checkpoint.restore(path, model, optimizer)
    parts = {}
    for file in sorted(path.glob("shard-*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                parts.setdefault(name, []).append(opened.get_tensor(name))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, name in names.items():
        assert torch.equal(torch.cat(parts[f"model/{name}"]), parameter)
        for key in ("first_moment", "second_moment"):
            saved = torch.cat(parts[f"optimizer/{name}/{key}"])
            assert torch.equal(saved, optimizer.state[parameter][key])


def test_convert_makes_an_ordinary_folder_of_a_sharded_checkpoint(two, tmp_path, capsys):
    command = "convert", checkpoint.newest(two[0] / "fsdp"), tmp_path / "whole"
    for words in (["--equalise"], ["--prefix", "a"], ["--rotate", "down"], ["--to", "gated"]):
        assert "convert it alone first" in refusal(capsys, *command, *words)
    assert call(*command) == 0
    folders = tmp_path / "whole", two[0] / "fsdp" / "final"
    whole, wanted = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert whole == wanted


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("nan", "stopped at step 6: the loss is nan in process 1; the last finite loss was"),
        ("full", "process 1 cannot write .*File too large.*; make room and resume"),
        ("differ", "process 1 has config.learning_rate 0.1, and process 0 0.01"),
        ("indivisible", "2 processes cannot share .* batch_size 3 equally: .* multiple of 2, or"),
    ],
)
def test_a_fault_in_one_process_ends_both_with_one_line(two, name, line):
    first, second = (one[name] for one in two[1])
    assert first["error"] == second["error"]
    assert re.search(line, first["error"])
    assert [first["elsewhere"], second["elsewhere"]] == [False, True]  # who prints it
    if name == "full":
        assert list((two[0] / "full" / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(("accumulation", "batch_size"), [(4, 2), (2, 2), (1, 4), (3, 4)])
def test_tokens_are_the_same_however_many_processes_share_a_step(tiny, accumulation, batch_size):
    config = tiny.make_config(accumulation=accumulation, batch_size=batch_size)
    batches = tiny.Batches(size=batch_size)

    def step(size):
        parts = []
        for rank in range(size):
            dealt = dealt_among(config, size)
            part = own_part(batches, range(accumulation), World(rank, size), dealt)
            parts += [row.tolist() for batch in part for row in batch["input_ids"]]
        return sorted(parts)

    assert step(1) == step(2) == step(4)


def test_processes_that_do_not_meet_say_so_in_one_line(tiny, tmp_path, monkeypatch):
    def run():
        config = replace(tiny.make_config(tokens=32), timeout=1.0)
        train(tiny.make_model(), tiny.Batches(), config, output=tmp_path / "run")

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClearheadError, match=r"variable MASTER_ADDR expected.*: start them"):
        run()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(closed.getsockname()[1]))
        with pytest.raises(ClearheadError, match=r"RANK=1 WORLD_SIZE=2 cannot join .* within 1 s"):
            run()
    assert not (tmp_path / "run").exists()


def test_one_process_trains_under_fsdp_without_torchrun(tiny, tmp_path):
    losses = []
    for parallel in ("ddp", "fsdp"):
        recorder = program.Losses()
        config = tiny.make_config(parallel=parallel)
        train(
            program.make_model(), tiny.Batches(), config, output=tmp_path / parallel,
            callbacks=[recorder],
        )  # fmt: skip
        losses.append(recorder.lines)
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    assert not torch.distributed.is_initialized()


def test_after_a_kill_torchrun_goes_on_and_the_curve_is_the_unbroken_one(two, warm, tmp_path):
    request = {"config": FSDP, "events": {"1": {"6": "kill"}}, "output": "run"}
    options = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", "0"]
    options += ["--nproc-per-node", "2", "--max-restarts", "1"]
    done = warm.run(PROGRAM, tmp_path, json.dumps([request]), *options)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "killed").exists()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 13))
    assert [json.loads(line)["loss"] for line in lines] == two[1][0]["fsdp"]["losses"]


def test_a_hanging_process_is_named(hanging):
    done = hanging.wait()
    assert done.returncode == 1
    assert "process 0 of 2 gave up on another" in done.stderr
    assert "Ranks 1 failed to pass monitoredBarrier" in done.stderr


@pytest.fixture
def hosts(tmp_path):
    """Two hosts' networks on one machine: namespaces with addresses of their own, and a cable."""
    allowed = shutil.which("ip") and not subprocess.run(["unshare", "-n", "true"]).returncode
    if os.geteuid() or not allowed:
        pytest.skip("network namespaces need root, and iproute2")
    names = [f"clearhead-{os.getpid()}-{letter}" for letter in "ab"]

    def ip(words):
        subprocess.run(["ip", *words.split()], check=True)

    for name in names:
        ip(f"netns add {name}")
    try:
        ip(f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
        for number, name in enumerate(names, 1):
            ip(f"-n {name} addr add 10.99.0.{number}/24 dev cable")
            ip(f"-n {name} link set cable up")
            ip(f"-n {name} link set lo up")
        yield names
    finally:
        for name in names:
            ip(f"netns del {name}")


def test_two_hosts_with_addresses_of_their_own_train_as_one(hosts, warm, tmp_path):
    config = json.dumps([{"config": FSDP | SHORT, "output": "run"}])
    agents = []
    for rank, host in enumerate(hosts):
        words = f"--nnodes 2 --node-rank {rank} --nproc-per-node 1 --master-addr 10.99.0.1"
        environment = {"HOST_NETWORK": f"/run/netns/{host}", "GLOO_SOCKET_IFNAME": "cable"}
        words = PROGRAM, tmp_path, config, *words.split(), "--master-port", 29500
        agents.append(warm.start(*words, env=os.environ | environment))
    for done in [agent.wait() for agent in agents]:
        assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"answers-{r}.json").read_text())[0] for r in (0, 1))
    assert first["steps"] == second["steps"] == 4
    assert (tmp_path / "run" / "final" / "model.safetensors").exists()
