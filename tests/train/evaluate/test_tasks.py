"""The cases of every task: solved from their text alone by small programs that know nothing of how they were made."""

import re
import zlib
from collections import Counter

import numpy as np
import pytest

from train.config.settings.evaluate import SECTIONS, EvaluateConfig
from train.data.tokenizer import ByteTokenizer
from train.evaluate.tasks import TASKS, Vocabulary, cases, check_tasks, lengths_of
from train.evaluate.tasks import passkey as passkey_module
from train.evaluate.tasks.common_words import LIST, common_words
from train.evaluate.tasks.needles import _numbers
from train.evaluate.tasks.text import IDLE, compose, drawn, filling, with_needles


class Chunks:
    """A tokenizer whose tokens are up to three letters of a word, with the space before it, numbered as they come."""

    bos, eos, opening = 0, 1, (0,)

    def __init__(self):
        self.known = {}

    def tokens(self, text):
        found = re.findall(r" ?\w{1,3}|\W", text.decode())
        return np.array([self.known.setdefault(piece, len(self.known) + 2) for piece in found], np.uint16)

    def decode(self, tokens):
        pieces = {number: piece for piece, number in self.known.items()}
        return "".join(pieces.get(int(token), "") for token in tokens).encode()


BYTES = Vocabulary(ByteTokenizer())
VOCABULARIES = {"bytes": BYTES, "chunks": Vocabulary(Chunks())}
TEXTS = [name for name in TASKS if SECTIONS[name] in ("needles", "variable_tracking", "words")]
CONFIG = EvaluateConfig(tasks=tuple(TASKS))


def all_samples(name, vocabulary, length, config=CONFIG):
    return [sample for group in cases(name, config.section(name), vocabulary, length) for sample in group.samples]


def numbers(prompt):
    return re.findall(r"The number of the (\w+) is (\d+)\. ", prompt)


def solve_one(prompt):
    (asked,) = re.findall(r"\nWhat is the number of the (\w+)\?", prompt)
    return [dict(numbers(prompt))[asked]]


def solve_values(prompt):
    (asked,) = re.findall(r"\nWhat are the \d+ numbers of the (\w+),", prompt)
    return [number for thing, number in numbers(prompt) if thing == asked]


def solve_queries(prompt):
    (asked,) = re.findall(r"\nWhat are the numbers of the (.*)\?", prompt)
    return [dict(numbers(prompt))[thing] for thing in asked.split(", the ")]


def solve_variables(prompt):
    values = {}
    for name, source in re.findall(r"Let (\w+) = (\w+)\. ", prompt):
        values[name] = values.get(source, source)
    (asked,) = re.findall(r"have the value (\d+),", prompt)
    return [name for name, value in values.items() if value == asked]


def words(prompt):
    return re.findall(r"\nList: (.*)\.\n", prompt)[0].split()


def solve_common(prompt):
    (times,) = re.findall(r"that stand there (\d+) times", prompt)
    return [word for word, count in Counter(words(prompt)).items() if count == int(times)]


def solve_frequent(prompt):
    (asked,) = re.findall(r"The (\d+) most frequent", prompt)
    counts = Counter(words(prompt)).most_common()
    highest = [count for _, count in counts[: int(asked) + 1]]
    assert len(set(highest)) == len(highest), "two words are equally frequent"
    return [word for word, _ in counts[: int(asked)]]


SOLVERS = {
    "needle_single": solve_one,
    "needle_multi_key": solve_one,
    "needle_multi_value": solve_values,
    "needle_multi_query": solve_queries,
    "variable_tracking": solve_variables,
    "common_words": solve_common,
    "frequent_words": solve_frequent,
}


def answers(sample, vocabulary):
    """The answers of a text, without the space before each."""
    return [vocabulary.tokenizer.decode(sample.tokens[slice(*span)]).decode().strip() for span in sample.answers]


def prompt(sample, vocabulary):
    """The text before the first answer, which is all that a solver sees."""
    return vocabulary.tokenizer.decode(sample.tokens[: sample.answers[0][0]]).decode()


def test_every_task_has_a_section_and_a_solver_or_symbols():
    assert list(TASKS) == list(SECTIONS)
    assert set(SOLVERS) == set(TEXTS)


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
@pytest.mark.parametrize("name", TASKS)
def test_cases_have_exactly_the_length_and_end_with_their_answers(name, vocabulary):
    for length in (700, 701):
        for sample in all_samples(name, vocabulary, length):
            assert sample.tokens[0] == vocabulary.tokenizer.bos
            assert sample.tokens.dtype == np.int32
            if name == "passkey":
                assert len(sample.tokens) == length - CONFIG.passkey.new_tokens
                continue
            assert len(sample.tokens) == length
            assert all(0 < start < stop <= length for start, stop in sample.answers)
            if name in TEXTS:
                assert sample.answers[-1][1] == length - 1  # a full stop follows
            elif name != "mqar":
                assert sample.answers[-1][1] == length


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
@pytest.mark.parametrize("name", TEXTS)
def test_the_text_alone_gives_the_answers(name, vocabulary):
    samples = all_samples(name, vocabulary, 900)
    for sample in samples:
        found = SOLVERS[name](prompt(sample, vocabulary))
        assert found == answers(sample, vocabulary)
        assert len(set(found)) == len(found)
    # Answers of another case are wrong for this one.
    others = [answers(sample, vocabulary) for sample in samples[1:]]
    assert SOLVERS[name](prompt(samples[0], vocabulary)) not in others


def test_a_variable_is_set_to_the_one_before_in_its_chain():
    for sample in all_samples("variable_tracking", BYTES, 600):
        lines = re.findall(r"Let (\w+) = (\w+)\. ", prompt(sample, BYTES))
        sources = [source for _, source in lines]
        assert len(set(sources)) == len(sources) == 2 * 3  # two chains of three, none of which branches
        assert sum(source.isdigit() for source in sources) == 2


def listed_words(length):
    """The rarer words in the list of a common-words case, with byte tokens; None where the text is too short."""
    try:
        sample = common_words(np.random.default_rng(3), BYTES, length, common=2, often=3, seldom=2)
    except ValueError:
        return None
    words = re.findall(r"\w+", prompt(sample, BYTES).split(LIST)[1].split("\n")[0])
    return {word for word, count in Counter(words).items() if count == 2}


def test_a_word_joins_the_list_as_soon_as_it_fits():
    found = {length: words for length in range(150, 420) if (words := listed_words(length))}
    first = {len(words): (length, words) for length, words in reversed(found.items())}
    (least, one), (more, two), (most, three) = (first[count] for count in (1, 2, 3))
    assert least == min(found)
    for (begin, before), (end, after) in (((least, one), (more, two)), ((more, two), (most, three))):
        (new,) = after - before
        assert end - begin == 2 * len(f" {new}")


def test_short_lists_have_no_two_words_that_are_equally_frequent_either():
    config = EvaluateConfig(words=CONFIG.words.__class__(cases=1))
    samples = [all_samples("frequent_words", BYTES, length, config)[0] for length in range(230, 480, 5)]
    assert len({len(words(prompt(sample, BYTES))) for sample in samples}) > 5
    for sample in samples:
        assert solve_frequent(prompt(sample, BYTES)) == answers(sample, BYTES)


@pytest.mark.parametrize(("frequent", "power"), [(1, 0.6), (2, 1.0), (3, 1.5), (2, 2.0)])
def test_a_list_of_frequent_words_is_the_longest_that_fits(frequent, power):
    """Every word has six letters, so a word takes seven tokens. One token of idle text is the least."""
    for length in range(300, 900, 75):
        sample = TASKS["frequent_words"].draw(np.random.default_rng(1), BYTES, length, frequent=frequent, power=power)
        text = prompt(sample, BYTES)
        counts = np.array(sorted(Counter(words(text)).values(), reverse=True))
        idle = text.index(LIST) - (text.index("\n") + 1)
        room = 7 * counts.sum() + idle - 1

        def law(c):
            return np.round(c * np.arange(1, 1000) ** -power)

        fitting = [c for c in range(1, 200) if 7 * law(c).sum() <= room and (np.diff(law(c)[: frequent + 1]) < 0).all()]
        wanted = law(fitting[-1])
        np.testing.assert_array_equal(counts, wanted[wanted > 0])


@pytest.mark.parametrize("vocabulary", VOCABULARIES.values(), ids=VOCABULARIES)
def test_a_passkey_is_hidden_in_filler_and_asked_for_once(vocabulary):
    keys = []
    for sample in all_samples("passkey", vocabulary, 600):
        text = vocabulary.tokenizer.decode(sample.tokens).decode()
        key = sample.answer.decode()
        assert re.findall(r"\d+", text) == [key, key]
        assert 10_000 <= int(key) < 100_000
        assert text.startswith(passkey_module._OPENING)
        assert text.endswith("The pass key is")
        keys.append(key)
    assert len(set(keys)) > 0.95 * len(keys)


@pytest.mark.parametrize("name", ["passkey", "needle_single"])
def test_a_needle_is_at_its_depth_to_within_half_a_sentence(name):
    needle = {"passkey": r"The pass key is \d+\. Remember it.*? key\. ", "needle_single": r"The number of the .*?\. "}
    opening, longest = (
        (passkey_module._OPENING, max(map(len, passkey_module.SENTENCES)))
        if name == "passkey"
        else ("Some things in this text have numbers. Keep them in mind.\n", max(map(len, IDLE)))
    )
    for group in cases(name, CONFIG.section(name), BYTES, 1000):
        for sample in group.samples:
            text = BYTES.tokenizer.decode(sample.tokens).decode().removeprefix(opening)
            text = text[: text.rindex("\nWhat is")]
            found = re.search(needle[name], text)
            before, idle = found.start(), len(text) - len(found[0])
            assert abs(before - group.depth * idle) <= longest / 2
            assert before == 0 if group.depth == 0 else before == idle if group.depth == 1 else 0 < before < idle


def test_idle_text_does_not_stop_within_a_sentence():
    text = BYTES.tokenizer.decode(all_samples("passkey", BYTES, 777)[50].tokens).decode().split("\n")[1]
    assert "".join(re.findall(r"Grass.*? more\. ", text))  # whole cycles
    assert re.search(r"[a-z]\. The pass key", text)
    assert re.search(r"is the pass key\. [A-Z]", text)


def test_needles_of_one_place_keep_their_order():
    idle = [np.arange(10, 14), np.arange(14, 16)]
    needles = [np.array([1]), np.array([2]), np.array([3])]
    found = np.concatenate(with_needles(idle, needles, [0.1, 0.2, 0.9]))
    assert found.tolist() == [1, 2, 10, 11, 12, 13, 14, 15, 3]
    assert np.concatenate(with_needles(idle, needles, [0.6, 1.0, 0.0])).tolist() == [3, 10, 11, 12, 13, 1, 14, 15, 2]


def test_a_needle_is_put_at_the_nearest_start_of_a_sentence():
    """Sentences start after 0, 4 and 6 tokens: 0.35 of 6 tokens is nearer to 4, 0.3 to 0, 0.9 to 6."""
    for depth, place in ((0.3, 0), (0.35, 1), (0.8, 1), (0.9, 2)):
        found = with_needles([np.arange(10, 14), np.arange(14, 16)], [np.array([1])], [depth])
        assert [part[0] for part in found].index(1) == place


@pytest.mark.parametrize("size", [1, 5, 29, 30, 31, 400])
def test_a_filling_ends_with_a_sentence_and_has_the_size(size):
    parts = filling(BYTES, drawn(np.random.default_rng(size)), size)
    text = BYTES.tokenizer.decode(np.concatenate(parts)).decode()
    assert len(text) == size
    assert text.endswith(". "[-size:])
    sentences = [BYTES.tokenizer.decode(part).decode() for part in parts]
    assert set(sentences[1:]) <= set(IDLE)
    assert any(sentence.endswith(sentences[0]) for sentence in IDLE)


def test_a_filling_begins_with_a_whole_sentence_where_one_fits():
    parts = filling(BYTES, iter(["Oh. ", "A day. ", "So it is. "]), 17)
    assert [BYTES.tokenizer.decode(part).decode() for part in parts] == ["A day. ", "So it is. "]


def test_a_filling_takes_no_sentence_that_it_does_not_need():
    sentences = iter(["A day. ", "So it is. ", "More. "])
    parts = filling(BYTES, sentences, len("A day. So it is. "))
    assert [BYTES.tokenizer.decode(part).decode() for part in parts] == ["A day. ", "So it is. "]
    assert next(sentences) == "More. "


@pytest.mark.parametrize("digits", [1, 2])
def test_the_numbers_of_needles_are_all_those_with_so_many_digits(digits):
    """A 0 in front does not count as a digit."""
    wanted = range(10 ** (digits - 1), 10**digits)
    assert sorted(map(int, _numbers(np.random.default_rng(0), len(wanted), digits))) == list(wanted)


class End:
    """A generator that always chooses from the beginning, or from the end."""

    def __init__(self, part):
        self.part = part

    def choice(self, values, count, replace=True):
        return np.asarray(values)[:count] if self.part == "first" else np.asarray(values)[-count:]

    def permutation(self, values):
        return np.arange(values) if np.ndim(values) == 0 else np.asarray(values)

    def integers(self, stop):
        return 0

    def random(self, count):
        return np.zeros(count)


@pytest.mark.parametrize(("part", "line"), [("first", "Let ABCD = 10000."), ("last", "Let WXYZ = 99999.")])
def test_variables_have_four_letters_and_their_values_five_digits(part, line):
    sample = TASKS["variable_tracking"].draw(End(part), BYTES, 300, chains=1, hops=0)
    assert line in prompt(sample, BYTES)


def test_recall_queries_every_pair_once_and_nothing_else_is_a_key():
    for sample in all_samples("mqar", BYTES, 120):
        tokens, pairs = sample.tokens.tolist(), CONFIG.mqar.pairs
        shown = dict(zip(tokens[1 : 2 * pairs : 2], tokens[2 : 2 * pairs + 1 : 2], strict=True))
        queries = [start for start, _ in sample.answers]
        assert sorted(tokens[place - 1] for place in queries) == sorted(shown)
        assert [shown[tokens[place - 1]] for place in queries] == [tokens[place] for place in queries]
        assert all(tokens.count(key) == 2 for key in shown)
        assert not set(shown) & set(shown.values())


def test_recall_distances_follow_the_power_law():
    config = EvaluateConfig(batch_tokens=10**6, mqar=EvaluateConfig().mqar.__class__(cases=4000, pairs=1, power=0.5))
    slots = [(sample.answers[0][0] - 2 - 2) // 2 for sample in all_samples("mqar", BYTES, 2 + 2 + 2 * 30, config)]
    law = np.arange(1, 31) ** -0.5
    wanted = 4000 * law / law.sum()
    found = np.bincount(slots, minlength=30)
    # Pearson's statistic with 29 degrees of freedom is above 60 once in 1600 times; the cases are always the same.
    assert ((found - wanted) ** 2 / wanted).sum() < 60


@pytest.mark.parametrize("length", [4, 5, 64, 65])
def test_a_copy_repeats_the_string_before_the_marker(length):
    for sample in all_samples("copy", BYTES, length):
        tokens, first = sample.tokens.tolist(), sample.answers[0][0]
        marker, string = tokens[first - 1], tokens[1 : first - 1]
        assert tokens.count(marker) == 1
        assert tokens[first:] == string[: length - first]
        assert [start for start, _ in sample.answers] == list(range(first, length))
        assert len(string) - len(tokens[first:]) == length % 2


@pytest.mark.parametrize("name", ["induction", "passkey_tokens"])
def test_the_last_symbol_occurs_once_before_at_the_depth_and_what_followed_is_the_answer(name):
    for group in cases(name, CONFIG.section(name), BYTES, 101):
        for sample in group.samples:
            tokens, first = sample.tokens.tolist(), sample.answers[0][0]
            marker, size = tokens[first - 1], len(tokens) - first
            assert tokens[:first].count(marker) == 2
            place = tokens.index(marker)
            assert tokens[place + 1 : place + 1 + size] == tokens[first:]
            idle = len(tokens) - 1 - 2 * (1 + size)
            assert place - 1 == round(group.depth * idle)


def test_symbols_are_single_visible_characters():
    text = BYTES.tokenizer.decode(BYTES.symbols).decode()
    assert len(text) == len(set(text)) == 94
    assert text.isascii()
    assert text.isprintable()
    assert " " not in text


@pytest.mark.parametrize("name", TASKS)
def test_cases_are_the_same_every_time_and_differ_from_each_other(name):
    once, again = all_samples(name, BYTES, 800), all_samples(name, BYTES, 800)
    assert all((a.tokens == b.tokens).all() for a, b in zip(once, again, strict=True))
    assert len({sample.tokens.tobytes() for sample in once}) == len(once)
    section = CONFIG.section(name)
    assert len(once) == section.cases * (section.depths if TASKS[name].has_depth else 1)


def test_cases_are_the_same_in_every_process():
    for number, group in enumerate(cases("passkey", CONFIG.passkey, BYTES, 600)):
        generator = np.random.default_rng([zlib.crc32(b"passkey"), 600, number])
        keys = [str(generator.integers(10_000, 100_000)).encode() for _ in group.samples]
        assert [sample.answer for sample in group.samples] == keys


@pytest.mark.parametrize("name", TASKS)
def test_the_error_for_a_short_length_names_the_shortest_that_works(name):
    section = CONFIG.section(name)
    sizes = {size: getattr(section, size) for size in TASKS[name].sizes if size != "depth"}
    sizes |= {"depth": 0.5} if TASKS[name].has_depth else {}
    with pytest.raises(ValueError, match="a length of 3 tokens is too short: it takes") as error:
        TASKS[name].draw(np.random.default_rng(0), BYTES, 3, **sizes)
    needed = int(re.search(r"takes (\d+)", str(error.value))[1])
    TASKS[name].draw(np.random.default_rng(0), BYTES, needed, **sizes)
    with pytest.raises(ValueError, match="too short"):
        TASKS[name].draw(np.random.default_rng(0), BYTES, needed - 1, **sizes)


def test_more_pairs_than_keys_are_refused():
    sample = TASKS["mqar"].draw(np.random.default_rng(0), BYTES, 1000, pairs=47, power=0.01)
    assert len(sample.answers) == 47, "half of the 94 symbols are keys"
    with pytest.raises(ValueError, match="48 pairs need as many keys, the vocabulary has 47"):
        TASKS["mqar"].draw(np.random.default_rng(0), BYTES, 1000, pairs=48, power=0.01)


def test_a_task_takes_its_own_lengths_or_those_that_hold_it():
    def config(**section):
        return EvaluateConfig(tasks=("needle_single",), needles=CONFIG.needles.__class__(**section))

    assert lengths_of("needle_single", config(), BYTES) == (256, 512)
    assert lengths_of("needle_single", config(lengths=(300, 900)), BYTES) == (300, 900)
    with pytest.raises(
        ValueError, match=r"evaluate\.tasks: needle_single: a length of 64 .*evaluate\.needles\.lengths"
    ):
        check_tasks(config(lengths=(64, 900)), BYTES)
    short = EvaluateConfig(lengths=(16, 32), tasks=("needle_single",))
    with pytest.raises(ValueError, match="needle_single: a length of 32 tokens is too short"):
        check_tasks(short, BYTES)


def test_room_for_an_answer_is_left():
    sample = compose(BYTES, 100, "A. ", drawn(np.random.default_rng(0)), [], [], [("?", False)], room=40)
    assert len(sample.tokens) == 60


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tasks": ("passky",)}, r"evaluate\.tasks: unknown task 'passky'; did you mean 'passkey'"),
        ({"tasks": ("copy", "copy")}, r"evaluate\.tasks: 'copy' appears twice"),
        ({"stride": 33}, r"evaluate\.stride must be from 0 to the shortest length, 32, found 33"),
        ({"stride": -1}, r"evaluate\.stride must be from 0"),
        ({"copy": {"lengths": (64, 8192)}}, r"evaluate\.batch_tokens must hold the longest window \(8192\)"),
        ({"copy": {"lengths": (64, 32)}}, r"evaluate\.copy\.lengths must rise, found \[64, 32\]"),
        ({"copy": {"lengths": (1,)}}, r"evaluate\.copy\.lengths must all be above 1, found 1"),
        ({"mqar": {"cases": 0}}, r"evaluate\.mqar\.cases must be positive, found 0"),
        ({"mqar": {"power": 0.0}}, r"evaluate\.mqar\.power must be positive, found 0\.0"),
        ({"words": {"power": 0.1}}, r"evaluate\.words\.power must be at least 0\.5, found 0\.1"),
        ({"induction": {"depths": 1}}, r"evaluate\.induction\.depths counts the first and the last"),
    ],
)
def test_bad_settings_are_refused_in_one_line(values, message):
    def built(name, value):
        return getattr(CONFIG, name).__class__(**value) if isinstance(value, dict) else value

    with pytest.raises(ValueError, match=message) as error:
        EvaluateConfig(**{name: built(name, value) for name, value in values.items()})
    assert "\n" not in str(error.value)
