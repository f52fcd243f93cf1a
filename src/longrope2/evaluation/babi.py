"""Stories of the bAbI tasks 1 to 3 (Weston et al., 2015), made by a small world that knows every answer.

People walk between rooms, take things and leave things. Each act is a fact, in bAbI's words. A reader knows the facts
alone: where somebody was before the first step is never said. So a question is only asked if the facts answer it.

qa1  Where is Mary?                              one fact: the last step of Mary
qa2  Where is the milk?                          two: who took or left it, and where that person was
qa3  Where was the milk before the office?       three: two places one after the other, and who took it
"""

import random
from dataclasses import dataclass, field
from itertools import pairwise

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
ROOMS = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
WALK = ("went to", "went back to", "moved to", "journeyed to", "travelled to")
TAKE = ("got", "took", "grabbed", "picked up")
LEAVE = ("dropped", "discarded", "left", "put down")
STORY_SIZES = {"qa1": range(2, 11, 2), "qa2": range(2, 33), "qa3": range(4, 33)}
"""Facts of a story."""
WALKING, TAKING, LEAVING = 3, 3, 1
"""How often each is done, where it can be."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """Facts in the order of time, and what they answer."""

    facts: tuple[str, ...]
    question: str
    answer: str


@dataclass
class World:
    """Where everybody and everything is, and what of it a reader of the facts can know."""

    rng: random.Random
    places: dict[str, str] = field(init=False)
    """Of people, and of things that nobody holds."""
    holders: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    """People whose place was said."""
    trails: dict[str, list[str]] = field(default_factory=lambda: {thing: [] for thing in THINGS})
    """The rooms that a thing is known to have been in, one after the other."""

    def __post_init__(self) -> None:
        self.places = {name: self.rng.choice(ROOMS) for name in PEOPLE + THINGS}

    def place(self, name: str) -> str:
        """Where a person or thing is now."""
        return self.places[self.holders.get(name, name)]

    def walk(self, person: str) -> str:
        """Go to another room, with all that the person holds."""
        room = self.rng.choice([room for room in ROOMS if room != self.places[person]])
        self.places[person] = room
        self.seen.add(person)
        for thing, holder in self.holders.items():
            if holder == person:
                self.trails[thing].append(room)
        return f"{person} {self.rng.choice(WALK)} the {room}."

    def take(self, person: str, thing: str) -> str:
        """Pick up what lies in the same room."""
        room, trail = self.places[person], self.trails[thing]
        self.holders[thing] = person
        if person in self.seen and trail[-1:] != [room]:
            trail.append(room)
        return f"{person} {self.rng.choice(TAKE)} the {thing}{self._there()}."

    def leave(self, person: str, thing: str) -> str:
        """Put down what the person holds."""
        self.places[thing] = self.places[self.holders.pop(thing)]
        return f"{person} {self.rng.choice(LEAVE)} the {thing}{self._there()}."

    def act(self) -> str:
        """Let somebody do something that can be done."""
        person = self.rng.choice(PEOPLE)
        room = self.places[person]
        near = [thing for thing in THINGS if thing not in self.holders and self.places[thing] == room]
        held = [thing for thing in THINGS if self.holders.get(thing) == person]
        weights = (WALKING, TAKING * bool(near), LEAVING * bool(held))
        (choice,) = self.rng.choices((None, near, held), weights)
        if choice is None:
            return self.walk(person)
        return (self.take if choice is near else self.leave)(person, self.rng.choice(choice))

    def _there(self) -> str:
        return self.rng.choice(("", " there"))


def make_story(task: str, rng: random.Random) -> Story:
    """A story of one of the three tasks."""
    while True:
        world, size = World(rng), rng.choice(STORY_SIZES[task])
        facts = tuple(world.walk(rng.choice(PEOPLE)) if task == "qa1" else world.act() for _ in range(size))
        asked = _questions(task, world)
        if asked:  # few of the shortest stories have an answer
            question, answer = rng.choice(asked)
            return Story(facts=facts, question=question, answer=answer)


def _questions(task: str, world: World) -> list[tuple[str, str]]:
    """All that the facts answer."""
    if task == "qa1":
        return [(f"Where is {person}?", world.place(person)) for person in PEOPLE if person in world.seen]
    if task == "qa2":
        return [(f"Where is the {thing}?", world.place(thing)) for thing in THINGS if world.trails[thing]]
    # A room that a thing came to twice has two rooms before it, so it is not asked for.
    return [
        (f"Where was the {thing} before the {room}?", before)
        for thing, trail in world.trails.items()
        for before, room in pairwise(trail)
        if trail.count(room) == 1
    ]
