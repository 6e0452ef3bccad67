"""Launch scripts: what a shell would make of their words, without a shell, and the table of Megatron-LM's arguments."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

import pytest
from hypothesis import given, settings, strategies as st

from parallelism.training import ARGUMENTS, OPTIONS, UNCHANGING, launch_flags
from parallelism.training.launch_script import launch_words
from parallelism.training.shell_arithmetic import arithmetic

BASH = shutil.which("bash")


def words(text: str, **given: str) -> list[str]:
    return [word.text for word in launch_words(text, given).words]


# -- the table ---------------------------------------------------------------------------------------------------------


def test_every_argument_of_megatron_has_a_class() -> None:
    """A name that is added to the table without a class, or with another, fails here."""
    assert len(ARGUMENTS) == 944
    assert {each.kind for each in ARGUMENTS.values()} == {"modelled", "unchanging", "unmodelled"}
    assert all(each.values in ("0", "1", "*", "+") for each in ARGUMENTS.values())
    modelled = {each.name for each in ARGUMENTS.values() if each.kind == "modelled"}
    assert modelled == {option.name for option in OPTIONS} - {"fp32", "lora-rank", "lora-alpha", "lora-products",
                                                         "document-lengths", "document-variation", "fp4-format"}
    assert set(UNCHANGING) == set(ARGUMENTS) - modelled
    for option in OPTIONS:
        if option.name in ARGUMENTS:
            assert option.switch == (ARGUMENTS[option.name].values == "0"), option.name


@pytest.mark.parametrize(("name", "kind"), [
    ("lr", "unchanging"), ("save", "unchanging"), ("init-method-std", "unchanging"), ("moe-aux-loss-coeff", "unchanging"),
    ("num-layers", "modelled"), ("attention-backend", "modelled"),
    ("tp-comm-overlap", "modelled"), ("tp-comm-overlap-rs-dgrad", "unmodelled"), ("cuda-graph-impl", "unmodelled"),
    ("optimizer-cpu-offload", "unmodelled"),
    ("overlap-param-gather", "modelled"), ("use-megatron-fsdp", "modelled"), ("cp-comm-type", "modelled"),
    ("no-rope-fusion", "unmodelled"),
])
def test_classes_say_what_changes_time_or_memory(name: str, kind: str) -> None:
    assert ARGUMENTS[name].kind == kind


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("text", "expected"), [
    ("--a 'x y' --b \"p q\" --c r\\ s", ["--a", "x y", "--b", "p q", "--c", "r s"]),
    ("--a 1 # --b 2\n--c#3 '#4' \"#5\"", ["--a", "1", "--c#3", "#4", "#5"]),
    ("--a \\\n  1 \\\n--b", ["--a", "1", "--b"]),
    ("--a ''\"\" --b", ["--a", "", "--b"]),
    ("TP=8\n--tp $TP --pp ${PP:-4} --x \"${TP}-a\" '$TP'", ["--tp", "8", "--pp", "4", "--x", "8-a", "$TP"]),
    ("A=\nB=${A:-3}\nC=${A-4}\n--b $B --c \"$C\" $A", ["--b", "3", "--c", ""]),
    ("A=\"${B:-${C:-7}}\"\n--a $A", ["--a", "7"]),
    (": ${A:=5}\n--a $A", ["--a", "5"]),
    ("A=(--x 1 # c\n 'y z'\n)\nrun.py \"${A[@]}\" ${A[@]} $A", ["--x", "1", "y z", "--x", "1", "y", "z", "--x"]),
    ("A=(--x 1)\nA+=(--y 2)\nrun.py ${A[@]} \"${A[*]}\"", ["--x", "1", "--y", "2", "--x 1 --y 2"]),
    ("A=\" \\\n  --x 1 \\\n --y '2'\"\nrun.py $A", ["--x", "1", "--y", "'2'"]),
    ("A=\"--x 1\"\nA=\"$A --y\"\nA+=' --z'\npython -u train.py $A", ["--x", "1", "--y", "--z"]),
    ("export A=1 B=2; --a $A$B", ["--a", "12"]),
    ("declare -a A=(--a 1)\nreadonly B=2\nx.py ${A[@]} --b $B", ["--a", "1", "--b", "2"]),
    ("set -euo pipefail\ncd /tmp; mkdir -p \"$X\"\n--a", ["--a"]),
    ("CUDA=1 torchrun --nnodes 2 pretrain.py --a \"$@\" $*", ["--a"]),
    ("A=(--nproc_per_node 8)\nB=(--x 1)\nC='--y 2'\nD=other", ["--x", "1", "--y", "2"]),
    ("A=$A\nA=${A}x\n--a 1", ["--a", "1"]),
    ("--moe-layer-freq ([0]*3+[1]*11) --b", ["--moe-layer-freq", "([0]*3+[1]*11)", "--b"]),
    ("--pipeline-model-parallel-layout=Et*2|(tt|)*5t|tmL --b", ["--pipeline-model-parallel-layout=Et*2|(tt|)*5t|tmL", "--b"]),
    ("\ufeff--a\r\n--b 1\r\n", ["--a", "--b", "1"]),
    ("--a \"x\\\"\\$y\\z\" a\\\nb", ["--a", 'x"$y\\z', "ab"]),
    ("G=8\nN=4\nW=$(($G*N + 2))\n--a $W --b $((W / 5))x \"$(( -(W-1) % 4 ))\"", ["--a", "34", "--b", "6x", "-1"]),
    ("O=\" \\\n --x 1\"\nR=\"python -u d/run.py $@ $O\"\nsrun -l \\\n --output=x sh -c \"$R\"", ["--x", "1"]),
    ("", []), ("#", []), ("A=1", []), ("--a $", ["--a", "$"]),
])
def test_words_are_those_of_a_shell(text: str, expected: list[str]) -> None:
    assert words(text) == expected


def test_given_names_win_and_the_names_that_are_read_are_told() -> None:
    found = launch_words("TP=${TP:-8}\nPP=4\n--tp $TP --pp $PP --dp $DP", {"TP": "2", "DP": "3", "X": "9"})
    assert [word.text for word in found.words] == ["--tp", "2", "--pp", "4", "--dp", "3"]
    assert found.names == {"TP", "PP", "DP"}
    assert [word.line for word in found.words] == [3] * 6
    assert launch_words("--a $((X * Y))", {"X": "3"}).words[1].text == "\0Y\0"       # it has no value


def test_a_command_is_passed_over_where_a_value_is_given_for_its_name() -> None:
    text = "N=$(nproc --all \"$(x ')')\")/2\nD=\"`date +'%d'` $(pwd)\"\n--n $N --d \"$D\""
    assert [word.text for word in launch_words(text, {"N": "8", "D": "1"}).words] == ["--n", "8", "--d", "1"]
    for broken in ("N=$(nproc", "N=`nproc", "N=$(a '", "N=$(a (b)"):
        with pytest.raises(ValueError, match="is not closed"):
            launch_words(broken, {"N": "8"})
    with pytest.raises(ValueError, match=r"line 2: .* is a command, and nothing is run here"):
        launch_words("N=1\n--a $(nproc)", {"N": "8"})


@pytest.mark.skipif(BASH is None, reason="needs bash")
@settings(max_examples=60, deadline=None)
@given(st.text("0123456789+-*/%() ", min_size=1, max_size=14))
def test_random_sums_are_those_of_bash(text: str) -> None:
    try:
        ours = arithmetic(text)
    except ValueError:
        return
    done = subprocess.run([str(BASH), "-c", f"echo $(({text}))"], capture_output=True, text=True)
    # Two signs that touch are another operator in a shell.
    assert done.stdout == f"{ours}\n" or re.search(r"\+\+|--|\*\*", text)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("text", "error"), [
    ("--a 1\n--b $(nproc)", "line 2: $(...) is a command, and nothing is run here"),
    ("A=1\nB=$(nproc)", "line 2: $(...) is a command, and nothing is run here; --set B=... says what B is"),
    ("B=`pwd`/x", "line 1: `...` is a command, and nothing is run here; --set B=... says what B is"),
    ("A=$((2**3))", "line 1: $((...)) with '2**3' is not read here: a number is missing"),
    ("A=$((2<<3))", "$((...)) with '2<<3' is not read here: it has integers, + - * / % and parentheses only"),
    ("A=$((1/0))", "it divides by 0"), ("A=$((9223372036854775807+1))", "numbers are decimal, and have 64 bits"),
    ("A=$((2", "line 1: $((...)) is not closed on its line"), ("A=$((x$(y)))", "$(...) is a command"),
    ("A=$((" + "(" * 21 + "1" + ")" * 21 + "))", "more than 20 parentheses lie in each other"),
    ("--a `date`", "line 1: `...` is a command"),
    ("--a \"`date`\"", "line 1: `...` is a command"),
    ("\n\nrun.py --a 1 | tee log", "line 3: a pipe | joins commands"),
    ("run.py --a > log", "line 1: > writes a file"), ("run.py --a 2>&1", "line 1: > writes a file"),
    ("run.py < x", "line 1: < reads a file"), ("run.py --a &", "line 1: & is for commands"),
    ("for i in 1 2; do\n--a $i\ndone", "line 1: for is a command of the shell"),
    ("if [ -z $A ]; then\n:\nfi", "line 1: if is a command of the shell"),
    ("f() { :; }", "line 1: a parenthesis ( without quotes"), ("(ls)", "line 1: a parenthesis ("),
    ("--a )", "line 1: a parenthesis ) has no beginning"), ("A=(--a", "line 1: a parenthesis ( is not closed"),
    ("A=(--a; b)", "line 1: a parenthesis ( is not closed"),
    ("--a 1\n--b 'x", "line 2: a quote ' is not closed"), ("--a \"x\n\n", 'line 1: a quote " is not closed'),
    ("--a ${A", "line 1: ${ is not closed"), ("--a ${A:-\n", "line 1: ${ is not closed"),
    ("--a ${#A}", "line 1: ${ must be followed by a name"), ("--a ${!A}", "must be followed by a name"),
    ("--a ${A%.*}", "line 1: ${A%...} is not read here"), ("--a ${A[0]}", "${A[...} is not read"),
    ("--a $?", "line 1: $? is not read here"), ("--a $'x'", "line 1: $' is not read"),
    ("--a " + "${A:-" * 30, "more than 20 ${...} lie in each other"),
    ("rm -rf /", "line 1: 'rm' is a command, and nothing is run here"),
    ("source env.sh", "'source' is a command"), ("eval $A", "'eval' is a command"),
    ("A=" + "x" * 4000 + "\n" + "A=$A$A\n" * 30, "the text has more than 4,000,000 characters"),
])
def test_what_only_a_shell_can_do_is_refused_by_line(text: str, error: str) -> None:
    with pytest.raises(ValueError) as refused:
        launch_words(text, {})
    assert error in str(refused.value) and str(refused.value).count("\n") == 0


SAFE = st.text("ab-=1 '\"\\#\n$A{}:", max_size=30)


@pytest.mark.skipif(BASH is None, reason="needs bash")
@settings(max_examples=60, deadline=None)
@given(SAFE)
def test_random_words_are_those_of_bash(text: str) -> None:
    """bash prints the words of an array; what it refuses is not compared, nor a name with a broken line inside."""
    script = f"A='1 b'\nW=({text})\n"
    try:
        ours = words(script + 'run.py "${W[@]}"')
    except ValueError:
        return
    done = subprocess.run([str(BASH), "-f"], input=script + "printf '%s\\0' \"${W[@]}\"", capture_output=True, text=True)
    if done.returncode or done.stderr or any("\0" in word for word in ours) or re.search(r"\$(?![A{])", text):
        return
    if "$" in text and "\\\n" in text:
        return
    theirs = done.stdout.split("\0")[:-1]
    assert ours == (theirs if theirs != [""] or ours else [])


# -- flags -------------------------------------------------------------------------------------------------------------


def test_flags_are_modelled_or_others() -> None:
    text = "--num-layers 4 --bf16 --lr=1 --lr 2 --data-path 0.5 x 0.5 y --tp-comm-overlap-rs-dgrad --swiglu"
    found = launch_flags(text, {})
    assert found.words == ["--num-layers", "4", "--bf16", "--swiglu"]
    assert found.others == ["lr", "data-path", "tp-comm-overlap-rs-dgrad"]


def test_names_without_a_value_matter_where_a_flag_is_modelled() -> None:
    text = "run.py --data-path $DATA $MORE --num-layers $LAYERS --hidden-size ${WIDTH}8 --seed $SEED"
    with pytest.raises(ValueError, match=r"LAYERS, WIDTH have no value in the script; give --set LAYERS=... --set WIDTH="):
        launch_flags(text, {})
    assert launch_flags(text, {"LAYERS": "4", "WIDTH": "1", "vocab-size": "9", "swiglu": ""}).words == shlex.split(
        "--num-layers 4 --hidden-size 18 --vocab-size 9 --swiglu")
    with pytest.raises(ValueError, match="line 1: EXTRA has no value in the script; give --set EXTRA="):
        launch_flags("run.py --bf16 $EXTRA", {})
    with pytest.raises(ValueError, match="line 1: X has no value"):
        launch_flags("--$X 3", {})
    assert launch_flags("run.py --bf16 $EXTRA", {"EXTRA": ""}).words == ["--bf16"]


@pytest.mark.parametrize(("text", "error"), [
    ("--num-layres 4\n--lr 1 --foo --bf16",
     "Megatron-LM has no --num-layres (line 1; did you mean --num-layers?), --foo (line 2)"),
    ("\n".join(f"--zz{n} 1" for n in range(40)), "--zz11 (line 12) and 28 more"),
    ("run.py x --bf16", "line 1: a flag begins with two dashes, got 'x'"),
    ("--bf16 -x", "line 1: a flag begins with two dashes, got '-x'"),
    ("--bf16 yes", "line 1: nothing is expected behind --bf16: 'yes'"),
    ("--lr 1 2", "line 1: nothing is expected behind --lr VALUE: '2'"),
    ("--num-layers --bf16", "line 1: --num-layers needs a value"), ("--cp-comm-type", "line 1: --cp-comm-type needs a value"),
])
def test_wrong_flags_are_refused_all_at_once(text: str, error: str) -> None:
    with pytest.raises(ValueError) as refused:
        launch_flags(text, {})
    assert error in str(refused.value)
