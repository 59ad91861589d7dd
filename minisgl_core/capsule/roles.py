"""The roles whose steps can be recorded, each with its own types and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from .attention.capsule import AttentionCapsule
from .attention.reduce import reduce_attention
from .attention.run import AttentionRun, attention_requirement
from .moe.capsule import MoECapsule
from .moe.reduce import reduce_moe
from .moe.run import MoERun, moe_requirement

if TYPE_CHECKING:
    from minisgl_core.plugin_api import Caps
    from minisgl_core.registry import DeviceFacts
    from minisgl_core.registry.query import Requirement
    from minisgl_core.testing import BackendUnderTest, DeviceFixture

    from .base import Capsule
    from .run import Run
    from .search import Fails

__all__ = ["ROLES", "RoleTools"]


class RoleTools(NamedTuple):
    """What replaying and shrinking need of a role, for capsules of that role."""

    capsule: type[Capsule]
    requirement: Callable[[Any, DeviceFacts], Requirement]
    """What a capsule requires of a backend's caps"""
    run: Callable[[Any, BackendUnderTest, Caps, DeviceFixture], Run]
    reduce: Callable[[Any, Fails[Any]], Any]
    """One round of making a capsule smaller, except for its layers"""


ROLES: Final[Mapping[str, RoleTools]] = {
    "attention": RoleTools(AttentionCapsule, attention_requirement, AttentionRun, reduce_attention),
    "moe": RoleTools(MoECapsule, moe_requirement, MoERun, reduce_moe),
}
