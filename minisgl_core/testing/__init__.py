"""The conformance kit: does a backend do what its role's contract says and its caps claim?

Two ways in: inherit a suite in a test module (:class:`AttentionSuite` and its like), or ``minisgl verify ROLE:NAME``.
"""

from .attention import AttentionCase
from .case import Case, Finding
from .compare import TOLERANCE, Mismatch
from .contract import ContractCase
from .report import Report, verify
from .rig import Rig
from .run import Outcome, check, run_case, run_cases
from .subject import Subject
from .suite import AttentionSuite, Suite, cases_of

__all__ = [
    "TOLERANCE",
    "AttentionCase",
    "AttentionSuite",
    "Case",
    "ContractCase",
    "Finding",
    "Mismatch",
    "Outcome",
    "Report",
    "Rig",
    "Subject",
    "Suite",
    "cases_of",
    "check",
    "run_case",
    "run_cases",
    "verify",
]
