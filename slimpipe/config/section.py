"""What the sections of the settings have in common: strictness, marks on fields, and rules across keys.

A key's type says what it may hold. Two marks say more: `Planned` for values that the design has and the code has not
yet, `Refused` for features that would give wrong results. Both are refused by name; nothing is ever ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from slimpipe.config.allowed import allowed, choices
from slimpipe.config.yaml_text import shown

# Our own pydantic error types; `explain` turns them and pydantic's into lines.
REASON: Final = "slimpipe_reason"  # ctx["reason"] follows "key = value: "
LINES: Final = "slimpipe_lines"  # ctx["lines"] are whole lines, one under the other

# YAML 1.1 reads these words as booleans and 1.2 does not; people write either.
_SWITCH: Final = MappingProxyType({"on": True, "yes": True, "off": False, "no": False})


@dataclass(frozen=True)
class Planned:
    """Values designed but not built: those in `values`, or for which `when` is true."""

    what: str
    values: tuple[object, ...] = ()
    when: Callable[[Any], bool] | None = None

    def covers(self, value: Any) -> bool:
        """Whether `value` is one of them. True is not 1."""
        if any(type(value) is type(known) and value == known for known in self.values):
            return True
        return self.when is not None and not isinstance(value, bool) and self.when(value)


@dataclass(frozen=True)
class Refused:
    """A key that exists only to say why the feature does not: null and false are accepted, as absence."""

    what: str
    why: str


class Section(BaseModel):
    """A mapping of the YAML file: frozen, no unknown keys, no conversions between types beyond YAML's own quirks."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
    path: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _null_means_default(cls, data: Any) -> Any:
        """`kv_heads: null` asks for the default that follows from other keys."""
        if not isinstance(data, dict):
            return data
        fields = cls.model_fields
        return {k: v for k, v in data.items() if v is not None or k not in fields or not follows_others(fields[k])}

    @field_validator("*", mode="before")
    @classmethod
    def _by_name(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields[str(info.field_name)]
        if value is False and "off" in choices(field.annotation):
            value = "off"
        elif isinstance(value, str) and field.annotation is bool:
            value = _SWITCH.get(value.lower(), value)
        for mark in field.metadata:
            if isinstance(mark, Planned) and mark.covers(value):
                raise _reason(f"{mark.what} is not built yet; set it to {allowed(field)}")
            if isinstance(mark, Refused):
                if value is None or value is False:
                    return None
                raise _reason(f"{mark.what} are not supported: {mark.why}; remove the key")
        return value

    @model_validator(mode="after")
    def _rules(self) -> Self:
        refuse(self.problems())
        return self

    def problems(self) -> Iterator[str]:
        """One line for each rule across keys that the section breaks."""
        yield from ()

    def problem(self, key: str, reason: str) -> str:
        """The line that says what is wrong with `key`."""
        return f"{self.path}.{key} = {shown(getattr(self, key))}: {reason}"

    def record(self) -> dict[str, Any]:
        """The section as plain YAML values: every key, defaults too, so that a run's record outlives a change of
        defaults; less those that follow from other keys, so that an override of these still carries over."""
        left_out = {
            name
            for name, field in type(self).model_fields.items()
            if (follows_others(field) and name not in self.model_fields_set)
            or any(isinstance(mark, Refused) for mark in field.metadata)
        }
        return self.model_dump(mode="json", exclude=left_out)


def refuse(problems: Iterable[str]) -> None:
    """Raises the lines, if there are any, as one error of pydantic's."""
    lines = "\n".join(problems)
    if lines:
        raise PydanticCustomError(LINES, "{lines}", {"lines": lines})


def _reason(text: str) -> PydanticCustomError:
    return PydanticCustomError(REASON, "{reason}", {"reason": text})


def follows_others(field: FieldInfo) -> bool:
    """Whether a key's default is computed from other keys."""
    return field.default_factory is not None and field.default_factory_takes_validated_data is True
