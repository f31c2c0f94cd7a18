"""Hostlists: every form of Slurm's, folding as the inverse, and what cannot be read."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.importers.cluster.hostlist import expand, expand_or_report, fold, natural_order
from penstock.schemas.errors import InvalidDocument


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param("", "", id="empty"),
        pytest.param(" \n,", "", id="separators-only"),
        pytest.param("login1", "login1", id="one-name"),
        pytest.param("a[0-3,12],b7", "a0 a1 a2 a3 a12 b7", id="ranges-numbers-names"),
        pytest.param("g3-[057,059-061]", "g3-057 g3-059 g3-060 g3-061", id="padding"),
        pytest.param("n[08-11]", "n08 n09 n10 n11", id="padding-across-widths"),
        pytest.param("n[8-11]", "n8 n9 n10 n11", id="no-padding"),
        pytest.param("n[098-101]", "n098 n099 n100 n101", id="padding-to-three"),
        pytest.param("n[1-2,001]", "n1 n2 n001", id="a-width-per-range"),
        pytest.param("r[1-2]n[01-02]", "r1n01 r1n02 r2n01 r2n02", id="two-groups-right-one-faster"),
        pytest.param("r[1-2][3-4]", "r13 r14 r23 r24", id="groups-side-by-side"),
        pytest.param("n[1-2]-ib.site", "n1-ib.site n2-ib.site", id="suffix"),
        pytest.param("n[1-003]", "n1 n2 n3", id="the-lower-bound-says-the-width"),
        pytest.param("[1-2]x", "1x 2x", id="group-first"),
        pytest.param(" a[ 0 - 1 , 3 ] ,\n b ", "a0 a1 a3 b", id="blanks-everywhere"),
        pytest.param("b,a,b", "b a b", id="order-and-doubles-kept"),
        pytest.param("a,,b,", "a b", id="empty-members"),
        pytest.param("n[5-5]", "n5", id="range-of-one"),
    ],
)
def test_expands_every_form(text: str, names: str) -> None:
    assert expand(text) == names.split()


@pytest.mark.parametrize(
    ("names", "text"),
    [
        pytest.param("", "", id="nothing"),
        pytest.param("a3 a1 a2 a12", "a[1-3,12]", id="natural-order"),
        pytest.param("n10 n09", "n[09-10]", id="padding-kept"),
        pytest.param("n9 n10", "n[9-10]", id="no-padding"),
        pytest.param("n99 n100 n099", "n[099,99-100]", id="widths-told-apart"),
        pytest.param("r1n1 r1n2 r2n1 r2n2", "r[1-2]n[1-2]", id="a-rectangle"),
        pytest.param("r1n1 r1n2 r2n1", "r1n[1-2],r2n1", id="no-rectangle"),
        pytest.param("r2n1 r10n1 login", "login,r[2,10]n1", id="the-left-number-alone"),
        pytest.param("ip-10-0-0-1 ip-10-0-0-2 ip-10-0-1-1 ip-10-0-1-2", "ip-10-0-[0-1]-[1-2]", id="cloud-names"),
        pytest.param("n1.site n2.site", "n1.site,n2.site", id="suffixes-that-slurm-refuses-after-brackets"),
        pytest.param("a a", "a", id="each-once"),
        pytest.param("b1 a2", "a2,b1", id="single-numbers-without-brackets"),
        pytest.param(f"x{'1' * 30} x{'1' * 29}2", f"x{'1' * 30},x{'1' * 29}2", id="digits-that-count-nothing"),
    ],
)
def test_folds(names: str, text: str) -> None:
    assert fold(names.split()) == text
    assert sorted(expand(text)) == sorted(set(names.split()))


NUMBER = st.sampled_from(["", "0", "1", "2", "9", "10", "11", "01", "02", "09", "010", "99", "100", "099"])
NAME = st.builds(
    "{}{}{}{}{}".format,
    st.sampled_from("ab"),
    NUMBER,
    st.sampled_from(["-", "n"]),
    NUMBER,
    st.sampled_from(["", "", "z"]),
)
NAMES = st.lists(NAME, max_size=40)


@given(NAMES)
def test_expand_gives_back_what_fold_made_short(names: list[str]) -> None:
    text = fold(names)
    assert sorted(expand(text)) == sorted(set(names))
    assert fold(expand(text)) == text


@given(st.text("a1-[],0 9", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        names = expand(text)
    except InvalidDocument:
        return
    assert sorted(expand(fold(names))) == sorted(set(names))


def test_ten_thousand_names_in_any_order_fold_to_one_member() -> None:
    names = expand("r[00-24]n[001-400]")
    assert len(names) == 10_000
    assert names == sorted(names, key=natural_order)
    random.Random(7).shuffle(names)
    assert fold(names) == "r[00-24]n[001-400]"


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        pytest.param("ok,a[1-2", 5, "not closed", id="open"),
        pytest.param("[", 1, "not closed", id="open-alone"),
        pytest.param("a[1[2]]", 2, "not closed", id="nested"),
        pytest.param("a1]", 3, "closes nothing", id="closed-only"),
        pytest.param("a[]", 3, "'' is not a number", id="nothing-within"),
        pytest.param("a[1,,2]", 5, "'' is not a number", id="nothing-between"),
        pytest.param("a[1-2-3]", 3, "'1-2-3' is not a number", id="two-dashes"),
        pytest.param("a[x-y]", 3, "'x-y' is not a number", id="letters"),
        pytest.param("a[000x133]", 3, "'000x133' is not a number", id="boxes-of-old-systems"),
        pytest.param("a[١-٣]", 3, "is not a number", id="digits-of-other-scripts"),
        pytest.param("a[2,7-3]", 5, "the range 7-3 counts down", id="down"),
        pytest.param("a[0-999999999]", 1, "more than 1,000,000 names", id="huge"),
        pytest.param("b,a[0-999][0-999][0-999]", 3, "more than 1,000,000 names", id="huge-product"),
        pytest.param(f"a[{'9' * 5000}]", 3, "is not a number", id="too-many-digits"),
        pytest.param("x" * 256, 1, "at most 255 characters", id="long"),
        pytest.param("a\0b", 1, "printable", id="binary"),
    ],
)
def test_faults_name_the_column(text: str, column: int, message: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        expand(text)
    (fault,) = caught.value.faults
    assert fault.pointer == f"column {column}"
    assert message in fault.detail
    assert len(str(caught.value)) < 500


def test_all_faults_at_once() -> None:
    with pytest.raises(InvalidDocument) as caught:
        expand("a[2-1],b[x],c")
    assert [fault.pointer for fault in caught.value.faults] == ["column 3", "column 10"]


@pytest.mark.parametrize(("text", "faults"), [("a[1-2],b", []), ("a[1-2],b,c", [9]), ("a[1-2],b[1-2],c", [7])])
def test_all_members_together_have_a_limit(text: str, faults: list[int]) -> None:
    offsets: list[int] = []
    names = expand_or_report(text, lambda offset, detail: offsets.append(offset), most=3)
    assert offsets == faults
    assert len(names) <= 3


@pytest.mark.parametrize("name", ["", "a b", "a,b", "a[1]", "a]"])
def test_names_that_no_hostlist_can_say(name: str) -> None:
    with pytest.raises(InvalidDocument, match="cannot be in a hostlist"):
        fold(["fine", name])
