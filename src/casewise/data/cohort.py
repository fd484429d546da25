"""A cohort: cases by id, each loaded when it is asked for, and labels through a door of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from casewise.core.errors import BadInput
from casewise.core.records import Case, Mask, check_case_id


@dataclass(frozen=True)
class Member:
    """What is known of a case without opening it."""

    id: str
    group: str | None = None
    cluster: str | None = None
    split: str | None = None
    labelled: bool = False

    def __post_init__(self) -> None:
        check_case_id(self.id)


@dataclass(frozen=True)
class Cohort:
    """Members in a fixed order; ``case(id)`` reads an image, ``label(id)`` reads a truth. Nothing is read before."""

    name: str
    members: Mapping[str, Member]
    read_case: Callable[[Member], Case]
    read_label: Callable[[Member], Mask] | None = None
    classes: tuple[str, ...] = ()  # names of the labels 0, 1, 2, ...
    ignore: int | None = None  # label value that is not scored
    notice: str = ""  # a sentence that every report about this cohort shows
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[str, ...]:
        """Case ids in order."""
        return tuple(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[Case]:
        return (self.case(case_id) for case_id in self.members)

    def case(self, case_id: str) -> Case:
        """The image of a case, without its label."""
        return self.read_case(self._member(case_id))

    def label(self, case_id: str) -> Mask:
        """The truth of a case."""
        member = self._member(case_id)
        if self.read_label is None or not member.labelled:
            raise BadInput(f"case {case_id} of {self.name} has no label; score only labelled cases")
        return self.read_label(member)

    def select(self, *, split: str | None = None, group: str | None = None) -> Cohort:
        """The members of a split, a group, or both."""
        kept = {
            case_id: member
            for case_id, member in self.members.items()
            if (split is None or member.split == split) and (group is None or member.group == group)
        }
        if not kept:
            splits = sorted({str(member.split) for member in self.members.values()})
            groups = sorted({str(member.group) for member in self.members.values()})
            raise BadInput(
                f"{self.name} has no case with split={split!r} and group={group!r}; splits: {splits}, groups: {groups}"
            )
        return replace(self, members=kept)

    def _member(self, case_id: str) -> Member:
        if case_id not in self.members:
            raise BadInput(f"{self.name} has no case {case_id!r}; it has {len(self)} cases, such as {self.ids[:3]}")
        return self.members[case_id]
