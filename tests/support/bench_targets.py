"""What the tests of bench.isolated run in another process, which finds this module by its name."""

from __future__ import annotations

import io
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

from minisgl_core.bench.isolated import Finished

__all__ = ["act", "mute"]


def act(connection: Connection, job: Any, items: tuple[Any, ...], switches: Mapping[str, Any]) -> None:
    """Each item says what to do."""
    for item in items:
        connection.send((os.getpid(), job, switches["MINISGL_DISABLE_OVERLAP_SCHEDULING"]))
        if item == "die":
            tqdm(disable=False, file=io.StringIO())
            os._exit(7)
        if item == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if item == "hang":
            time.sleep(600)
        connection.send(Finished(suspect=item == "spoil"))


def mute(connection: Connection, job: Any, items: tuple[Any, ...], switches: Mapping[str, Any]) -> None:
    """A target that never sends anything."""
    time.sleep(600)
