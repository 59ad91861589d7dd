"""The conformance kit: does a backend do what its role's contract says and its caps claim?

Two ways in: inherit a suite in a test module (:class:`AttentionSuite` and its like), or ``minisgl verify ROLE:NAME``.
"""

from .attention import AttentionCase
from .case import Case, Finding
from .comm import CommCase
from .compare import TOLERANCE, Mismatch
from .contract import ContractCase
from .graph import GraphCase
from .kv import KVCase
from .linear import FusedLinearCase, LinearCase
from .moe import MoECase
from .ops import OpsCase
from .ops_sample import SampleCase
from .report import Report, verify
from .rig import Rig
from .run import Outcome, check, run_case, run_cases
from .subject import Subject
from .suite import (
    AttentionSuite,
    CommSuite,
    GraphSuite,
    KVSuite,
    LinearSuite,
    MoESuite,
    OpsSuite,
    Suite,
    cases_of,
    suite_for,
)

__all__ = [
    "TOLERANCE",
    "AttentionCase",
    "AttentionSuite",
    "Case",
    "CommCase",
    "CommSuite",
    "ContractCase",
    "Finding",
    "FusedLinearCase",
    "GraphCase",
    "GraphSuite",
    "KVCase",
    "KVSuite",
    "LinearCase",
    "LinearSuite",
    "Mismatch",
    "MoECase",
    "MoESuite",
    "OpsCase",
    "OpsSuite",
    "Outcome",
    "Report",
    "Rig",
    "SampleCase",
    "Subject",
    "Suite",
    "cases_of",
    "check",
    "run_case",
    "run_cases",
    "suite_for",
    "verify",
]
