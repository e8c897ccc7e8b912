"""Command-line options from configuration dataclasses: one name everywhere, one place for defaults.

A field ``max_num_seqs`` is ``--max-num-seqs`` on the command line and ``max_num_seqs`` in a TOML
file. What a user did not give stays out of the result, so that sources can be layered.
"""

from __future__ import annotations

import argparse
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from infer.errors import ConfigError


def add_options(
    parser: argparse.ArgumentParser,
    title: str,
    kind: type,
    texts: Mapping[str, str],
) -> None:
    """Add a group with one option for every field of ``kind`` that ``texts`` explains.

    Fields of ``kind`` must be numbers, strings, booleans, literals or tuples of strings, each
    perhaps None.
    """
    group = parser.add_argument_group(title)
    hints = get_type_hints(kind)
    for field in fields(kind):
        if field.name in texts:
            flag = "--" + field.name.replace("_", "-")
            text = texts[field.name] + _default(field.default)
            group.add_argument(
                flag,
                dest=field.name,
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
                **_argument(hints[field.name]),
            )


def given(args: argparse.Namespace, kind: type) -> dict[str, Any]:
    """The fields of ``kind`` that the user gave on the command line."""
    values = vars(args)
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}


def read_options(path: str, tables: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Read a TOML file of options, one table a kind; every table is there, perhaps empty.

    Raises:
        ConfigError: the file cannot be read, or has another table.
    """
    known = tuple(tables)
    try:
        data = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    for name, value in data.items():
        if name not in known or not isinstance(value, dict):
            raise ConfigError(f"{path}: {name!r} is not one of the tables {', '.join(known)}")
    return {name: data.get(name, {}) for name in known}


def build(kind: type, options: Mapping[str, Any]) -> Any:
    """Make ``kind`` from untrusted option names.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or out of range.
    """
    known = {f.name for f in fields(kind)}
    hints = get_type_hints(kind)
    values = {}
    for name, value in options.items():
        if name not in known:
            raise ConfigError(
                f"unknown option {name!r}; the options are {', '.join(sorted(known))}"
            )
        values[name] = _typed(name, value, hints[name])
    return kind(**values)


def _typed(name: str, value: Any, hint: Any) -> Any:
    kinds = _kinds(hint)
    if get_origin(kinds[0]) is tuple and isinstance(value, (list, tuple)):
        return tuple(str(item) for item in value)
    if get_origin(kinds[0]) is Literal:
        return value  # the dataclass says which ones there are
    allowed = (*kinds, int) if float in kinds else kinds
    plain = tuple(k for k in allowed if isinstance(k, type))
    if not isinstance(value, plain) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join(k.__name__ for k in plain)
        raise ConfigError(f"{name} is {value!r}, it must be of type {names}")
    return value


def _kinds(hint: Any) -> list[Any]:
    """The types of an annotation, None last."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return sorted(members, key=lambda member: member is type(None))


def _argument(hint: Any) -> dict[str, Any]:
    kind = _kinds(hint)[0]
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"action": "append", "metavar": "TEXT"}
    return {"type": kind, "metavar": {int: "N", float: "X"}.get(kind, "TEXT")}


def _default(value: Any) -> str:
    if value is None or value is False or value == ():
        return ""
    return f" (default: {'on' if value is True else value})"
