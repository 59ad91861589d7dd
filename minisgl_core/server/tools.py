"""The tools of a request: which the model may call, and which it has to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field

from .body import Body

__all__ = ["FunctionName", "NamedTool", "Tool", "ToolRequest", "check_tools"]


class Function(Body):
    """``tools[].function``"""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """``tools[]``: a function"""

    type: Literal["function"]
    function: Function

    def template_data(self) -> dict[str, Any]:
        """As chat templates read it."""
        return self.model_dump(exclude_none=True, exclude={"function": {"strict"}})


class FunctionName(Body):
    """``tool_choice.function``"""

    name: str


class NamedTool(Body):
    """``tool_choice``: the function to call"""

    type: Literal["function"]
    function: FunctionName


Choice = Literal["none", "auto", "required"] | NamedTool | None


class ToolRequest(Protocol):
    """The part of a body that is about tools."""

    @property
    def tool_choice(self) -> Choice: ...

    @property
    def offered(self) -> Sequence[Tool]: ...


def check_tools(tools: Sequence[Tool] | None, choice: Choice) -> None:
    """Raise ValueError for a choice among tools that are not there, and for two of one name."""
    names = [tool.function.name for tool in tools or ()]
    if len(set(names)) < len(names):
        raise ValueError("`tools` has two functions of one name; rename one of them")
    if choice is not None and choice != "none" and not names:
        raise ValueError("`tool_choice` is given without `tools`; give both, or leave it out")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise ValueError(f"`tool_choice` names {choice.function.name!r}, which `tools` does not have")
