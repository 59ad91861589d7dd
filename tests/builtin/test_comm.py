"""Collectives between two real processes over gloo."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import pytest
import torch

from minisgl_core.builtin.comm import TorchDistCommunicator, report_loss
from minisgl_core.errors import EngineError
from minisgl_core.plugin_api import CommSetup

RANK = """
import json, sys, torch
from minisgl_core.builtin.comm import TorchDistCommunicator
from minisgl_core.errors import EngineError
from minisgl_core.plugin_api import CommSetup
rank, port = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
comm = TorchDistCommunicator(CommSetup(torch.device("cpu"), rank, 2, f"tcp://127.0.0.1:{port}", 30.0))
logits = torch.tensor([[0., 1, 2, 3], [10, 11, 12, 13]]) + 4 * rank
found = {"gather": comm.all_gather(logits).tolist()}
for name in ("float32", "bfloat16", "float16"):
    x = torch.full((3,), rank + 1.0, dtype=getattr(torch, name))
    found[name] = comm.all_reduce(x).tolist()
comm.check_equal("plan", "same")
try:
    comm.check_equal("plan", f"digest-{rank}")
except EngineError as error:
    found["error"] = str(error)
comm.close()
print(json.dumps(found))
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_case_6_two_ranks_gather_columns_in_rank_order_and_sum():
    port = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(r), port], stdout=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    for process in ranks:
        out, _ = process.communicate(timeout=120)
        assert process.returncode == 0
        found = json.loads(out)
        assert found["gather"] == [[0, 1, 2, 3, 4, 5, 6, 7], [10, 11, 12, 13, 14, 15, 16, 17]]
        assert found["float32"] == found["bfloat16"] == found["float16"] == [3.0, 3.0, 3.0]
        assert "rank 0: digest-0" in found["error"] and "rank 1: digest-1" in found["error"]


def test_one_rank_needs_no_connection():
    comm = TorchDistCommunicator(CommSetup(torch.device("cpu"), 0, 1, "", 1.0))
    x = torch.randn(2, 3)
    assert comm.all_reduce(x) is x and comm.all_gather(x) is x
    comm.check_equal("plan", "anything")


def test_a_rank_without_an_answer_says_where_it_tried():
    with pytest.raises(EngineError, match=r"rank 1 of 2 could not reach the others at tcp://127.0.0.1:\d+"):
        TorchDistCommunicator(CommSetup(torch.device("cpu"), 1, 2, f"tcp://127.0.0.1:{free_port()}", 1.0))


def test_a_rank_that_never_comes_is_named():
    setup = CommSetup(torch.device("cpu"), 0, 3, f"tcp://127.0.0.1:{free_port()}", 0.1)
    with pytest.raises(EngineError, match=r"after 0.1 s these are missing: 1, 2; check that every rank"):
        TorchDistCommunicator(setup)


def test_a_lost_rank_ends_the_waiting():
    setup = CommSetup(torch.device("cpu"), 0, 3, f"tcp://127.0.0.1:{free_port()}", 1000.0)
    reporter = threading.Thread(target=report_loss, args=(setup.init_method, 2))
    reporter.start()
    with pytest.raises(EngineError, match="rank 2 is lost"):
        TorchDistCommunicator(setup)
    reporter.join()
