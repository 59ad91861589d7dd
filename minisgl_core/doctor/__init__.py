"""What is wrong with this installation, and what to do about it."""

from .diagnosis import Diagnosis, diagnose
from .finding import Finding
from .plans import RankPlan

__all__ = ["Diagnosis", "Finding", "RankPlan", "diagnose"]
