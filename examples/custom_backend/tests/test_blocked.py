"""Tests of every claim of the spec, at its limits and just outside."""

from minisgl_core.testing import AttentionSuite

from minisgl_blocked.plugin import SPEC


class TestBlocked(AttentionSuite):
    spec = SPEC


SMALL_BLOCKS = {"query_block": 7}


class TestSmallBlocks(AttentionSuite):
    spec = SPEC
    options = SMALL_BLOCKS
