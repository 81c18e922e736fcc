"""Multi-needle retrieval: facts hidden in a long text about other things, and questions on them.

A haystack of distractor sentences holds N needles, "The magic number of CITY is NNNNNN."; R of them
are asked for at the end. A sample is a function of its parameters and its index alone, on every
version of Python and numpy (`draw.py`).

Several needles, several questions, depth by depth: as Ye et al. 2024, "Differential Transformer",
measure key information retrieval; the sentences and the generator are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from quantkit.calib_sets.draw import Draw
from quantkit.errors import InputError

CITIES: Final = (
    "Accra", "Adelaide", "Algiers", "Almaty", "Amman", "Ankara", "Antwerp", "Athens", "Baku",
    "Bamako", "Bangkok", "Basel", "Belfast", "Bergen", "Bogota", "Bremen", "Brisbane", "Cairo",
    "Calgary", "Cardiff", "Chicago", "Colombo", "Dakar", "Dallas", "Denver", "Dublin", "Durban",
    "Florence", "Geneva", "Glasgow", "Granada", "Hamburg", "Hanoi", "Harare", "Havana", "Helsinki",
    "Istanbul", "Jakarta", "Kampala", "Karachi", "Kyoto", "Lagos", "Leipzig", "Lima", "Lisbon",
    "Ljubljana", "Lusaka", "Madrid", "Manila", "Marseille", "Melbourne", "Montreal", "Mumbai",
    "Nairobi", "Naples", "Osaka", "Oslo", "Ottawa", "Porto", "Quito", "Riga", "Rosario", "Santiago",
    "Seoul", "Seville", "Sofia", "Tallinn", "Toronto", "Tunis", "Utrecht", "Vienna", "Vilnius",
    "Warsaw", "Zagreb", "Zurich",
)  # fmt: skip
_WHO: Final = (
    "baker", "carpenter", "ferryman", "gardener", "teacher", "painter", "nurse", "farmer",
    "librarian", "musician", "postman", "tailor", "sailor", "weaver", "cook", "clockmaker",
    "student", "neighbour", "shepherd", "mason", "potter", "translator", "judge", "dentist",
)  # fmt: skip
_HOW: Final = (
    "tall", "quiet", "young", "careful", "cheerful", "tired", "old", "curious", "honest", "busy",
    "clever", "patient", "stubborn", "shy", "proud", "gentle", "hungry", "thoughtful",
)  # fmt: skip
_DID: Final = (
    "repaired", "borrowed", "painted", "carried", "forgot", "found", "sold", "cleaned", "described",
    "measured", "hid", "returned", "admired", "dropped", "packed", "counted", "lent", "washed",
)  # fmt: skip
_WHAT: Final = (
    "wooden ladder", "blue umbrella", "copper kettle", "map of the coast", "basket of apples",
    "torn letter", "brass lamp", "pair of boots", "folding chair", "jar of honey", "garden gate",
    "stack of plates", "wool blanket", "broken violin", "bag of flour", "glass bottle",
    "leather suitcase", "roll of paper", "bundle of sticks", "small mirror", "stone bench",
    "box of candles", "green bicycle", "heavy curtain",
)  # fmt: skip
_WHERE: Final = (
    "behind the station", "near the harbour", "beside the river", "under the bridge",
    "in the market hall", "at the edge of the forest", "on the hill", "in the school yard",
    "next to the mill", "by the old wall", "in the narrow lane", "outside the museum",
    "across the square", "at the end of the pier", "in front of the theatre", "above the workshop",
)  # fmt: skip
_WHEN: Final = (
    "before breakfast", "after the storm", "on a cold morning", "late in the evening",
    "during the holidays", "at noon", "while it was raining", "on the first day of spring",
    "when the bells rang", "shortly after sunrise", "in the middle of the week", "last winter",
    "before the guests arrived", "as the snow melted", "every other day", "once in a while",
)  # fmt: skip
_SHAPES: Final = (
    "The {how} {who} {did} the {what} {where} {when}.",
    "{When}, the {how} {who} {did} a {what} {where}.",
    "{Where}, the {who} {did} the {what} of the {how} {other} {when}.",
    "Nobody knew why the {who} {did} the {what} {where} {when}.",
    "The {who} and the {how} {other} {did} a {what} {where} {when}.",
    "{When}, everyone said that the {how} {other} {did} the {what} {where}.",
)


@dataclass(frozen=True, kw_only=True)
class Needle:
    """One fact of a sample.

    Attributes:
        number: Six digits.
        depth_frac: Share of the distractor sentences that stand before it, 0 to 1.
        start: Character of the context at which its sentence begins.
    """

    city: str
    number: str
    depth_frac: float
    start: int

    @property
    def sentence(self) -> str:
        """The fact as it stands in the context."""
        return f"The magic number of {self.city} is {self.number}."


@dataclass(frozen=True, kw_only=True)
class RetrievalSample:
    """A context and what is asked about it.

    Attributes:
        needles: In the order of the context.
        asked: Indices into `needles`, one a question.
    """

    context: str
    needles: tuple[Needle, ...]
    asked: tuple[int, ...]

    @property
    def questions(self) -> tuple[str, ...]:
        """Each ends where its answer begins: the text to be continued."""
        cities = (self.needles[index].city for index in self.asked)
        return tuple(
            f"Question: What is the magic number of {city}?\nAnswer: The magic number of {city} is"
            for city in cities
        )

    @property
    def answers(self) -> tuple[str, ...]:
        """The numbers, one a question."""
        return tuple(self.needles[index].number for index in self.asked)

    @property
    def text(self) -> str:
        """All of it: the context, then each question with its answer."""
        pairs = zip(self.questions, self.answers, strict=True)
        return "\n\n".join([self.context, *(f"{question} {answer}." for question, answer in pairs)])


def retrieval_sample(
    index: int,
    *,
    seed: int = 0,
    needles: int = 4,
    queries: int = 2,
    sentences: int = 19,
    depths: Sequence[float] = (),
) -> RetrievalSample:
    """Returns sample `index` of the endless row.

    Args:
        sentences: Distractors, of about 17 tokens each.
        depths: Of the asked needles, 0 (first) to 1 (last), one a question; those that are not
            given are drawn, as those of the other needles.

    Raises:
        InputError: numbers that no sample can have.
    """
    _check(index, seed, needles, queries, sentences, depths)
    draw = Draw(seed, index)
    cities = draw.several(len(CITIES), needles)
    numbers = draw.several(900_000, needles)
    places = [draw.below(sentences + 1) for _ in range(needles)]
    for asked, depth in enumerate(depths):
        places[asked] = round(depth * sentences)
    # needle i is asked for where i < queries; the order of the context is by place
    order = sorted(range(needles), key=lambda needle: (places[needle], needle))
    parts: list[str] = []
    placed: list[Needle] = []
    length, written = 0, 0
    for needle in order:
        for _ in range(places[needle] - written):
            parts.append(_distractor(draw))
            length += len(parts[-1]) + 1
        written = places[needle]
        fact = Needle(
            city=CITIES[cities[needle]],
            number=str(100_000 + numbers[needle]),
            depth_frac=written / sentences if sentences else 0.0,
            start=length,
        )
        placed.append(fact)
        parts.append(fact.sentence)
        length += len(fact.sentence) + 1
    parts += [_distractor(draw) for _ in range(sentences - written)]
    return RetrievalSample(
        context=" ".join(parts),
        needles=tuple(placed),
        asked=tuple(order.index(asked) for asked in range(queries)),
    )


def _distractor(draw: Draw) -> str:
    def one(words: tuple[str, ...]) -> str:
        return words[draw.below(len(words))]

    shape, when, where = one(_SHAPES), one(_WHEN), one(_WHERE)
    return shape.format(
        how=one(_HOW),
        who=one(_WHO),
        did=one(_DID),
        what=one(_WHAT),
        other=one(_WHO),
        where=where,
        when=when,
        Where=where.capitalize(),
        When=when.capitalize(),
    )


def _check(
    index: int, seed: int, needles: int, queries: int, sentences: int, depths: Sequence[float]
) -> None:
    if not 1 <= needles <= len(CITIES):
        raise InputError(f"retrieval: expected 1 to {len(CITIES)} needles, got {needles}.")
    if not 1 <= queries <= needles:
        raise InputError(f"retrieval: expected 1 to {needles} queries, got {queries}.")
    if sentences < 0 or index < 0 or seed < 0:
        raise InputError(
            f"retrieval: expected 0 or more; got {sentences} sentences, sample {index}, seed "
            f"{seed}."
        )
    if len(depths) > queries or not all(0 <= depth <= 1 for depth in depths):
        raise InputError(
            f"retrieval: expected up to {queries} depths from 0 to 1, got {list(depths)}."
        )
