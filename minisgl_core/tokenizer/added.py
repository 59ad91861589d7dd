"""Added and special tokens of a Hugging Face folder: which file decides about a token.

The rules are those of transformers 5. The list of added tokens with flags is ``added_tokens_decoder`` of
tokenizer_config.json. Without that key it is added_tokens.json, overridden by the list in tokenizer.json, and
special_tokens_map.json takes precedence over tokenizer_config.json. A token of the list is special if its entry says so
or if it has a name such as ``eos_token``. A token that is named or listed as special, and that neither tokenizer.json
nor the list contains, is added with the flags of the place that names it. Naming a token changes nothing else about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import AddedToken

from ..errors import CheckpointError, nearest
from ..formats import read_json
from ..inputs import warn_once
from .keys import ROLES, TOKEN_FLAGS

__all__ = ["add_tokens", "without_token_names"]

_LISTED: Final = "extra_special_tokens"
_LISTED_V4: Final = "additional_special_tokens"
_OWN: Final = "model_specific_special_tokens"
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    _LISTED: (list, dict),
    _LISTED_V4: (list, dict),
    _OWN: (dict,),
    "added_tokens_decoder": (dict,),
    "split_special_tokens": (bool,),
}


class _Sources(NamedTuple):
    """The content of the files, each value from the file that takes precedence."""

    listed: dict[int, AddedToken]
    named: dict[str, str | AddedToken]
    """Token by role."""
    extra: list[str | AddedToken]


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Add the tokens of the folder's other files to ``backend``, and return role -> text of all named tokens.

    Raises :class:`~minisgl_core.errors.CheckpointError` for an entry that is not a token.
    """
    listed, named, extra = _sources(backend, folder, config)
    names = {_content(token) for token in named.values()}
    tokens: list[str | AddedToken] = [listed[number] for number in sorted(listed)]
    present = {token.content for token in (*backend.get_added_tokens_decoder().values(), *listed.values())}
    for token in (*named.values(), *extra):
        if _content(token) not in present and token not in tokens:
            tokens.append(token)
    added = [AddedToken(token, special=True) if isinstance(token, str) else token for token in tokens]
    for token in added:
        token.special = token.special or token.content in names
    backend.add_tokens(added)
    for number, token in listed.items():
        if (own := backend.token_to_id(token.content)) != number:
            warn_once(
                f"{str(folder)!r} gives {token.content!r} the id {number}, but its place in the vocabulary is {own}"
            )
    return {role: _content(token) for role, token in named.items()}


def without_token_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """All keys except those that name a token."""
    return {key: value for key, value in content.items() if not _is_token_name(key, value)}


def _is_token_name(key: str, value: object) -> bool:
    return key.endswith("_token") and isinstance(value, str | Mapping | AddedToken)


def _sources(backend: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]) -> _Sources:
    special_map = _optional(folder / "special_tokens_map.json")
    _check_types(config, _TYPES)
    _check_types(special_map, {**_TYPES, _LISTED_V4: (list,)})
    content = dict(config)
    if _LISTED_V4 in content and not content.get(_LISTED):
        content[_LISTED] = content.pop(_LISTED_V4)
    own = _own_names(content)
    entries = content.get("added_tokens_decoder")
    if entries is None:
        _merge_special_map(content, own, special_map)
        listed = _added_tokens_json(folder, content) | backend.get_added_tokens_decoder()
    else:
        _warn_of_unread(content, special_map, folder)
        listed = {int(number): _flagged(value, "added_tokens_decoder") for number, value in entries.items()}
    if _LISTED not in content:  # a mapping has left its place to the older name's list
        content[_LISTED] = content.pop(_LISTED_V4, None)
    return _Sources(listed, _named(content, own, listed), [_token(value, _LISTED) for value in content[_LISTED] or []])


def _named(
    content: Mapping[str, Any], own: Mapping[str, Any], listed: Mapping[int, AddedToken]
) -> dict[str, str | AddedToken]:
    """All named tokens; standard ones have the flags of the list."""
    with_flags = {token.content: token for token in listed.values()}
    tokens = {role: _token(content[role], role) for role in ROLES if content.get(role) is not None}
    named = {role: with_flags.get(_content(token), token) for role, token in tokens.items()}
    others = {key: value for key, value in content.items() if key not in ROLES and _is_token_name(key, value)}
    return named | {role: _token(value, role) for role, value in {**others, **own}.items()}


def _check_types(content: Mapping[str, Any], allowed: Mapping[str, tuple[type, ...]]) -> None:
    """Raise an error if a key has a value of the wrong type."""
    for key, types in allowed.items():
        value = content.get(key)
        if value is not None and not isinstance(value, types):
            raise _error(key, value, f"it must be {' or '.join(one.__name__ for one in types)}, as JSON has it")
    numbers = content.get("added_tokens_decoder") or {}
    for number in numbers:
        if not number.isdecimal():
            raise _error("added_tokens_decoder", numbers, f"its keys must be token ids, not {number!r}")


def _own_names(content: dict[str, Any]) -> dict[str, Any]:
    """Remove the model's own named tokens from ``content``: keys such as ``image_token``, and lists of names."""
    own = {key: content.pop(key) for key in list(content) if key not in ROLES and _is_text_token(key, content[key])}
    own |= content.pop(_OWN, None) or {}
    if isinstance(content.get(_LISTED), Mapping):
        own |= content.pop(_LISTED)
    return own


def _is_text_token(key: str, value: object) -> bool:
    return _is_token_name(key, value) and isinstance(value, str)


def _merge_special_map(content: dict[str, Any], own: dict[str, Any], special_map: Mapping[str, Any]) -> None:
    """Merge special_tokens_map.json into ``content``, over what is there; lists of special tokens are extended."""
    for key, value in special_map.items():
        if key == _LISTED and isinstance(value, list):
            before = list(content.get(_LISTED) or [])
            value = [*before, *(token for one in value if (token := _special(one, key)) not in before)]
        elif key != _LISTED and isinstance(value, Mapping):
            value = _special(value, key)
        content[key] = value
    if isinstance(content.get(_LISTED), Mapping):
        own |= content.pop(_LISTED)


def _warn_of_unread(content: Mapping[str, Any], special_map: Mapping[str, Any], folder: Path) -> None:
    for role in ROLES:
        other, counts = special_map.get(role), content.get(role)
        if other is not None and (counts is None or _content(_token(other, role)) != _content(_token(counts, role))):
            warn_once(
                f"`{role}` in {str(folder / 'special_tokens_map.json')!r} is ignored: tokenizer_config.json lists the "
                f"added tokens, so it decides"
            )


def _added_tokens_json(folder: Path, content: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The older list of added tokens, without flags. Special are those whose text ``content`` names."""
    entries = _optional(folder / "added_tokens.json")
    given = (*map(content.get, ROLES), *(content.get(_LISTED) or []))
    special = {_content(token) for token in given if isinstance(token, str | AddedToken)}
    return {
        number: AddedToken(text, normalized=text not in special, special=text in special)
        for text, number in entries.items()
    }


def _special(value: Any, key: str) -> str | AddedToken:
    token = _token(value, key)
    if isinstance(token, AddedToken):
        token.special = True
    return token


def _token(value: Any, key: str) -> str | AddedToken:
    return value if isinstance(value, str | AddedToken) else _flagged(value, key)


def _flagged(value: Any, key: str) -> AddedToken:
    """A token that is written as an object, with its flags."""
    if not isinstance(value, Mapping) or not isinstance(value.get("content"), str):
        raise _error(key, value, 'write a token as a text or as {"content": TEXT, ...}')
    flags = {name: flag for name, flag in value.items() if name not in ("content", "__type")}
    for name, flag in flags.items():
        if name not in TOKEN_FLAGS:
            raise _error(key, value, f"a token has no flag `{name}`; {nearest(name, TOKEN_FLAGS) or 'remove it'}")
        if not isinstance(flag, bool):
            raise _error(key, value, f"the flag `{name}` must be true or false")
    return AddedToken(value["content"], **flags)


def _content(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else str(token.content)


def _error(key: str, value: object, remedy: str) -> CheckpointError:
    return CheckpointError(f"`{key}` of the tokenizer holds {value!r:.80}", field=key, value=value, remedy=remedy)


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}
