"""The conformance kit: tests whether a backend follows the contract of its role and supports what its caps claim.

Inherit a suite in a test module, such as :class:`AttentionSuite`, or run ``minisgl verify ROLE:NAME``.
:class:`StubEngine` replaces the engine in tests of a scheduler.
"""

from .attention import AttentionCheck
from .backend_under_test import BackendUnderTest
from .check import Check, Result
from .comm import CommCheck
from .compare import TOLERANCE, Mismatch
from .contract import ContractCheck
from .device_fixture import DeviceFixture
from .grammar import GrammarCheck
from .graph import GraphCheck
from .kv import KVCheck
from .lifetime import LifetimeCheck
from .linear import FusedLinearCheck, LinearCheck
from .moe import MoECheck
from .ops import OpsCheck
from .ops_sample import SampleCheck
from .parser import ParserCheck
from .report import Report, verify
from .run import Outcome, assert_conforms, run_check, run_checks
from .stub_engine import NullEngine, StubEngine, expected_tokens
from .suite import (
    AttentionSuite,
    CommSuite,
    GrammarSuite,
    GraphSuite,
    KVSuite,
    LinearSuite,
    MoESuite,
    OpsSuite,
    ParserSuite,
    Suite,
    checks_of,
    suite_for,
)

__all__ = [
    "TOLERANCE",
    "AttentionCheck",
    "AttentionSuite",
    "BackendUnderTest",
    "Check",
    "CommCheck",
    "CommSuite",
    "ContractCheck",
    "DeviceFixture",
    "FusedLinearCheck",
    "GrammarCheck",
    "GrammarSuite",
    "GraphCheck",
    "GraphSuite",
    "KVCheck",
    "KVSuite",
    "LifetimeCheck",
    "LinearCheck",
    "LinearSuite",
    "Mismatch",
    "MoECheck",
    "MoESuite",
    "NullEngine",
    "OpsCheck",
    "OpsSuite",
    "Outcome",
    "ParserCheck",
    "ParserSuite",
    "Report",
    "Result",
    "SampleCheck",
    "StubEngine",
    "Suite",
    "assert_conforms",
    "checks_of",
    "expected_tokens",
    "run_check",
    "run_checks",
    "suite_for",
    "verify",
]
