"""YAML as the settings use it: 1.2 words and numbers, no duplicate keys, errors of one line.

PyYAML follows YAML 1.1, which turns `off` into False, `1e-4` into a string, `010` into 8 and `1:30` into 90. Here
`off` is a word, `1e-4` a number and the last two are strings, which a number's key then refuses.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

import yaml

from slimpipe.config.errors import ConfigError

_FLOAT: Final = re.compile(
    r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))([eE][-+]?\d+)?$|[-+]?\.inf$|\.nan$", re.ASCII
)
_RESOLVERS: Final = (
    ("bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), "tTfF"),
    ("int", re.compile(r"[-+]?(0|[1-9][\d_]*)$", re.ASCII), "-+0123456789"),
    ("float", _FLOAT, "-+.0123456789"),
    ("null", re.compile(r"(~|null|Null|NULL|)$"), ("~", "n", "N", "")),
)


class _Loader(yaml.SafeLoader):
    """YAML 1.2's core words and numbers, and every key a word that is given once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"key {shown(key)} is not a word", problem_mark=key_node.start_mark)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"key {shown(key)} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or `_Loader` would not read back as the string it is."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Line breaks that only Unicode knows come back from double quotes alone."""
    style = '"' if any(mark in text for mark in "\x85\u2028\u2029") else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
_Loader.yaml_implicit_resolvers = {}  # none of the parent's
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, list(_first))
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse(text: str, source: str) -> Any:
    """The value of a YAML text. Raises ConfigError, one line that begins with `source` and the place."""
    try:
        value = yaml.load(text, _Loader)
        json.dumps(value, default=str)  # refuses what contains itself
        return value
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error).splitlines()[0]
        raise ConfigError([f"{source}: not settings: {reason}"]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}, column {mark.column + 1}" if mark else source
        raise ConfigError([f"{place}: not valid YAML: {error.problem or error.context}"]) from error
    except yaml.reader.ReaderError as error:
        reason = f"character {error.position} (#x{error.character:04x}) is not allowed"
        raise ConfigError([f"{source}: not valid YAML: {reason}"]) from error


def dump(value: Any) -> str:
    """A YAML text that `parse` reads back as the same value, and so does any YAML 1.1 reader but for `1e-4` floats."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def shown(value: object) -> str:
    """A value on one line as one would write it in YAML; shortened where it is long, but for a path."""
    if isinstance(value, str) and _is_plain(value):
        text = value
    elif isinstance(value, float):
        text = repr(value)
    else:
        text = json.dumps(value, default=str)
    longest = 4096 if isinstance(value, str) else 80  # a path: its end is what tells it from others
    return text if len(text) <= longest else f"{text[: longest - 3]}..."


def _is_plain(text: str) -> bool:
    """Whether a string needs no quotes to be taken for that string."""
    if not text.isprintable() or not text or text != text.strip():
        return False
    return not any(pattern.match(text) for _, pattern, _ in _RESOLVERS)
