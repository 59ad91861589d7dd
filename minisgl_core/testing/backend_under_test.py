"""The backend under test: its spec, its origin, and its construction as in the core."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from minisgl_core.errors import BackendError
from minisgl_core.installation import Installed, check_requires
from minisgl_core.plugin_api import HOST_ROLES, AnyValue, BackendSpec, Caps, Role
from minisgl_core.registry import Candidate, Choice, DeviceFacts, Registry, build, discover
from minisgl_core.registry.matching import match
from minisgl_core.registry.query import Requirement
from minisgl_core.registry.selection import offers_of

__all__ = ["BackendUnderTest", "names_of"]

NOT_INSTALLED = "not-installed"


@dataclass(frozen=True)
class BackendUnderTest:
    """One backend. A spec that no installed plugin offers has the distribution ``not-installed``."""

    spec: BackendSpec
    distribution: str = NOT_INSTALLED
    version: str = "0"
    module: str = ""
    """The plugin's entry module; empty if it is not installed."""
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        what: BackendSpec | str,
        device: DeviceFacts,
        *,
        role: Role | None = None,
        options: Mapping[str, Any] | None = None,
        registry: Registry | None = None,
    ) -> BackendUnderTest:
        """From a spec, or from ``ROLE:NAME[/variant][@distribution]`` of an installed plugin.

        The role may be omitted if ``role`` is given. A name means its first variant that runs on this device. Raises
        :class:`UsageError` for an unknown name, and :class:`BackendError` with all reasons if no variant can run here.
        """
        if isinstance(what, BackendSpec):
            return cls(what, options=options or {})
        registry = registry or discover()
        offers = offers_of(what, registry, role)
        refusals = {item.label: _refusal(item.spec, device) for item in offers}
        fitting = [item for item in offers if not refusals[item.label]]
        if not fitting:
            reasons = "; ".join(f"{label}: {', '.join(found)}" for label, found in refusals.items())
            raise BackendError(f"{what} cannot run here: {reasons}", field="backend", value=what)
        return cls._from(fitting[0], registry, options or {})

    @classmethod
    def _from(cls, offer: Candidate, registry: Registry, options: Mapping[str, Any]) -> BackendUnderTest:
        record = next(p for p in registry.plugins if any(item.key == offer.key for item in p.candidates))
        module = record.entry_point.partition("=")[2].strip()
        return cls(offer.spec, offer.distribution, offer.version, module, options)

    @property
    def installed(self) -> bool:
        return self.distribution != NOT_INSTALLED

    @property
    def label(self) -> str:
        """Such as ``attention:fa/fa3@minisgl-fa``; accepted by :meth:`of` if the backend is installed."""
        variant = f"/{self.spec.variant}" if self.spec.variant else ""
        origin = f"@{self.distribution}" if self.installed else ""
        return f"{self.spec.role}:{self.spec.name}{variant}{origin}"

    def capability_sets(self, device: DeviceFacts) -> list[Caps]:
        """The capability sets that cover this device."""
        required = _on(self.spec, device)
        return [caps for caps in self.spec.caps if self.claims(required, [caps])]

    def claims(self, required: Requirement, capability_sets: Iterable[Caps]) -> bool:
        """True if one of these capability sets meets the requirement."""
        return any(match(_with(self.spec, caps), required)[0] is not None for caps in capability_sets)

    def choice(self, caps: Caps | None = None, options: Mapping[str, Any] | None = None) -> Choice:
        """The choice as a plan would contain it."""
        spec = self.spec
        return Choice(
            role=spec.role,
            name=spec.name,
            variant=spec.variant,
            distribution=self.distribution,
            version=self.version,
            factory=spec.factory,
            options_model=spec.options,
            options=self.options if options is None else options,
            ops=() if caps is None else caps.ops,
        )

    def build(self, setup: object, caps: Caps | None = None) -> Any:
        """Build ``Class(setup, options)`` and check its methods; raises like :func:`minisgl_core.registry.build`."""
        return build(self.choice(caps), setup)


def names_of(declared: tuple[str, ...] | AnyValue, everything: tuple[str, ...]) -> tuple[str, ...]:
    """A declared list of names, with ``ANY`` expanded."""
    return everything if isinstance(declared, AnyValue) else declared


def _with(spec: BackendSpec, caps: Caps) -> BackendSpec:
    return BackendSpec(role=spec.role, name=spec.name, factory=spec.factory, caps=(caps,))


def _refusal(spec: BackendSpec, device: DeviceFacts) -> list[str]:
    reasons = [str(reason) for reason in check_requires(spec, Installed())]
    return reasons + [str(reason) for reason in match(spec, _on(spec, device))[1]]


def _on(spec: BackendSpec, device: DeviceFacts) -> Requirement:
    """What the device requires of a backend."""
    return Requirement(device=None if spec.role in HOST_ROLES else device)
