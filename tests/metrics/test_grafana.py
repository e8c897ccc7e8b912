"""The dashboard in the eyes of Grafana's own models, and the files that provision it.

A model of ``grafana_foundation_sdk`` reads the fields that Grafana knows and passes over all
others, as Grafana itself does: what does not come back was written in vain.
"""

from __future__ import annotations

import copy
import enum
import json
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("grafana_foundation_sdk")
from grafana_foundation_sdk.cog import plugins, runtime
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard

GRAFANA = Path(__file__).resolve().parents[2] / "configs" / "grafana"
DASHBOARDS = sorted((GRAFANA / "dashboards").glob("*.json"))
SIMPLE: dict[Any, Any] = {
    str: str,
    bool: bool,
    int: int,
    float: (int, float),
    type(None): type(None),
}
# A unit may also be text of one's own, after one of these.
OWN_UNITS = ("prefix:", "suffix:")


def written(path: Path) -> dict[str, Any]:
    dashboard: dict[str, Any] = json.loads(path.read_text())
    return dashboard


def through(model: Any, fields: dict[str, Any]) -> tuple[Any, Any]:
    """What Grafana's ``model`` makes of ``fields``: its object, and that written as JSON again."""
    plugins.register_default_plugins()
    read = model.from_json(copy.deepcopy(fields))
    return read, json.loads(JSONEncoder().encode(read))


def lost(ours: Any, theirs: Any, at: str = "") -> Iterator[str]:
    """Paths of what is in ``ours`` and not, or not so, in ``theirs``, which may hold more."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in ours.items():
            if name in theirs:
                yield from lost(value, theirs[name], f"{at}.{name}")
            else:
                yield f"{at}.{name}"
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(one, other, f"{at}[{i}]")
    elif (type(ours), ours) != (type(theirs), theirs):
        yield at


def misfits(value: Any, hint: Any, at: str = "") -> Iterator[str]:
    """Paths of what Grafana's models drop, and of values that are not of the type, or not in the
    enumeration, which the models state."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [each for each in arguments if value is None or each is not type(None)]
        yield from min((list(misfits(value, each, at)) for each in kinds), key=len)
    elif isinstance(value, dict) and hasattr(hint, "from_json"):  # left by the outer model as it is
        read, back = through(hint, value)
        yield from lost(value, back, at)
        yield from misfits(read, hint, at)
    elif origin is typing.Literal:
        if value not in arguments:
            yield at
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value not in {member.value for member in hint}:
            yield at
    elif hint in SIMPLE:
        if not isinstance(value, SIMPLE[hint]) or isinstance(value, bool) != (hint is bool):
            yield at
    elif not isinstance(value, origin or (object if hint is Any else hint)):
        yield at
    elif isinstance(value, list):
        for i, each in enumerate(value):
            yield from misfits(each, arguments[0] if arguments else object, f"{at}[{i}]")
    elif hasattr(value, "to_json"):
        for name, kind in typing.get_type_hints(type(value)).items():
            yield from misfits(getattr(value, name), kind, f"{at}.{name}")


def complaints(dashboard: dict[str, Any]) -> list[str]:
    """Everything of ``dashboard`` that Grafana's models drop or do not allow."""
    return list(misfits(dashboard, Dashboard))


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafana_knows_every_field_and_value(path: Path) -> None:
    dashboard = written(path)
    assert complaints(dashboard) == []
    assert dashboard["schemaVersion"] <= Dashboard().schema_version  # older ones are migrated


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_grafana_has_the_panels_the_queries_and_the_units(path: Path) -> None:
    """What a panel of an unknown kind says would pass every model unread."""
    plugins.register_default_plugins()
    known = {typing.get_args(hint)[0] for hint in typing.get_type_hints(units).values()}
    assert len(known) > 100
    for panel in panels(written(path)):
        assert runtime.panelcfg_config(panel["type"]) is not None, panel["title"]
        for target in panel["targets"]:
            query = runtime.dataquery_from_json(target, target["datasource"]["type"])
            assert not isinstance(query, runtime.UnknownDataquery), panel["title"]
        unit = panel["fieldConfig"]["defaults"].get("unit")
        assert unit is None or unit in known or unit.startswith(OWN_UNITS), panel["title"]


WRONG: dict[str, tuple[str | int, ...]] = {
    "timeFrame": (),
    "titel": ("panels", 1),
    "width": ("panels", 1, "gridPos"),
    "legend": ("panels", 1, "targets", 0),
    "units": ("panels", 1, "fieldConfig", "defaults"),
    "opacity": ("panels", 1, "fieldConfig", "defaults", "custom"),
    "position": ("panels", 1, "options", "legend"),
    "multiple": ("templating", "list", 0),
    "option": ("panels", 33, "transformations", 0),
    "showPoints": ("panels", 1, "fieldConfig", "defaults", "custom"),
    "x": ("panels", 1, "gridPos"),
    "sort": ("templating", "list", 1),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_name_or_value_would_be_found(name: str) -> None:
    """The last three are names of Grafana's, with a value that it does not take."""
    dashboard = written(GRAFANA / "dashboards" / "purestep.json")
    at: Any = dashboard
    for step in WRONG[name]:
        at = at[step]
    at[name] = "wrong"
    (found,) = complaints(dashboard)
    assert found.rpartition(".")[2].replace("_", "").lower() == name.lower()


# Grafana's documentation, "Provision Grafana": the fields of its files, and their types.
DATA_SOURCE: dict[str, type] = {
    "name": str,
    "type": str,
    "access": str,
    "orgId": int,
    "uid": str,
    "url": str,
    "user": str,
    "database": str,
    "basicAuth": bool,
    "basicAuthUser": str,
    "withCredentials": bool,
    "isDefault": bool,
    "jsonData": dict,
    "secureJsonData": dict,
    "version": int,
    "editable": bool,
}
PROVIDER: dict[str, type] = {
    "name": str,
    "orgId": int,
    "folder": str,
    "folderUid": str,
    "type": str,
    "disableDeletion": bool,
    "updateIntervalSeconds": int,
    "allowUiUpdates": bool,
    "options": dict,
}
FILES = {
    "datasources": (DATA_SOURCE, {"name", "type", "access", "url"}),
    "dashboards": (PROVIDER, {"name", "type", "options"}),
}


@pytest.mark.parametrize("folder", FILES)
def test_provisioning_has_the_fields_that_grafana_documents(folder: str) -> None:
    known, needed = FILES[folder]
    (path,) = (GRAFANA / "provisioning" / folder).iterdir()
    file = yaml.safe_load(path.read_text())
    key = "providers" if folder == "dashboards" else folder
    assert file.keys() == {"apiVersion", key} and file["apiVersion"] == 1
    for entry in file[key]:
        assert needed <= entry.keys() <= known.keys()
        assert {name for name, value in entry.items() if type(value) is not known[name]} == set()
        if folder == "dashboards":
            assert entry["type"] == "file"
            assert entry["options"].keys() <= {"path", "foldersFromFilesStructure"}
            assert entry["options"]["path"].startswith("/")
        else:
            assert entry["access"] in ("proxy", "direct")
