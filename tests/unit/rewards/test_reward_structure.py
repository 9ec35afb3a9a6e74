import json
import re
import subprocess
import sys

import pytest
from pydantic import ValidationError

from grpo_cli.errors import RewardError, SetupError, install_extra
from grpo_cli.rewards.building import refuse
from grpo_cli.rewards.contract import Batch, RewardContext
from grpo_cli.rewards.kinds.json import JsonParams

SCHEMA = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}


def score(params, completion, **columns):
    batch = Batch([""], [completion], columns={name: [cell] for name, cell in columns.items()})
    return params.build(RewardContext(64))(batch)[0].value


@pytest.mark.parametrize(
    ("completion", "expected"),
    [
        ('{"a": 1}', 1),
        ("[1, 2]", 1),
        ('Here:\n```json\n{"a": 1}\n```\nDone.', 1),
        ('```\n{"a": 1}\n```', 1),
        ('```json\n{"a": 1}\n```\n```json\n{"a": \n```', 0),
        ('<think>{"a"</think>{"a": 1}', 1),
        ('<answer>{"a": 1}</answer>', 1),
        ('so {"a": 1}', 0),
        ("72", 0),
        ("null", 0),
        ("{}", 0),
        ("[]", 0),
        ("", 0),
        ("```json\n```", 0),
        ('{"a": NaN}', 0),
        ("{'a': 1}", 0),
        ("[" * 100_000, 0),
        ("[" + "9" * 10_000 + "]", 0),
    ],
)
def test_valid_json(completion, expected):
    assert score(JsonParams(), completion) == expected


@pytest.mark.parametrize(
    ("completion", "expected"), [('{"a": 1}', 1), ('{"a": "x"}', 0.25), ("{}", 0.25), ("{", 0)]
)
def test_schemas_from_all_places(completion, expected, tmp_path):
    path = tmp_path / "schema.json"
    path.write_text(json.dumps(SCHEMA))
    assert score(JsonParams(json_schema=SCHEMA, partial=0.25), completion) == expected
    assert score(JsonParams(path=str(path), partial=0.25), completion) == expected
    for cell in (SCHEMA, json.dumps(SCHEMA)):
        assert score(JsonParams(column="s", partial=0.25), completion, s=cell) == expected


def test_a_schema_may_want_a_bare_number():
    assert score(JsonParams(json_schema={"type": "integer"}), "72") == 1


def test_a_row_without_a_schema_does_not_apply():
    assert JsonParams(column="s").columns().required == ("s",)
    assert score(JsonParams(column="s"), "{}", s=None) is None


def test_references_are_not_fetched():
    reference = {"properties": {"a": {"$ref": "http://127.0.0.1:9/x.json"}}}
    [error] = JsonParams(json_schema=reference).build(RewardContext(64))(Batch([""], ['{"a": 1}']))
    assert "x.json" in repr(error)
    inside = {"$ref": "#/$defs/a", "$defs": {"a": {"const": {"b": 1}}}}
    assert score(JsonParams(json_schema=inside), '{"b": 1}') == 1


def test_a_rows_schema_that_is_not_json_is_found_before_scoring():
    rows = Batch(
        [""] * 3, [""] * 3, columns={"s": ["{'type': 'object'}", '{"type": "object"}', None]}
    )
    faults = [JsonParams(column="s").gold(rows, row) for row in range(3)]
    assert [bool(fault) for fault in faults] == [True, False, False]
    assert "json.dumps" in faults[0].fix


def test_wrong_parameters_are_refused():
    for params in ({"json_schema": SCHEMA, "column": "s"}, {"partial": 1}, {"extract": []}):
        with pytest.raises(ValidationError):
            JsonParams(**params)


def test_problems(tmp_path):
    assert JsonParams().problems() == []
    assert JsonParams(json_schema=SCHEMA).problems() == []
    [issue] = JsonParams(json_schema={"type": "objekt"}).problems()
    where, message = issue.path, issue.seen
    assert where == "json_schema"
    assert "'objekt'" in message
    [issue] = JsonParams(path=str(tmp_path / "none.json")).problems()
    where, message = issue.path, issue.seen
    assert where == "path"
    assert "cannot be read" in message
    assert issue.fix == "correct the path, or write the file"
    with pytest.raises(RewardError, match="not a JSON Schema"):
        refuse(JsonParams(json_schema={"type": 3}), RewardContext(64))


def test_a_missing_library_is_a_setup_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(SetupError, match=re.escape(install_extra("json"))):
        refuse(JsonParams(column="s"), RewardContext(64))
    assert score(JsonParams(), '{"a": 1}') == 1


def test_the_registry_does_not_load_it():
    code = (
        "import sys; from grpo_cli.rewards.registry import load_kinds; load_kinds(); "
        "print('jsonschema' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
