# SPDX-License-Identifier: Apache-2.0
"""Images that belong on nodes: what is made, and what a sandbox becomes."""

from __future__ import annotations

from random import Random

from agentsandbox.models.placement import Placement
from agentsandbox.warmpool.book import Create, Destroy, PoolBook, Recycle, Waiter
from agentsandbox.warmpool.outlook import Announcement
from agentsandbox.warmpool.ratelimit import AdaptiveLimiter
from agentsandbox.warmpool.replenisher import Demand, Evict, Make, Replenisher
from agentsandbox.warmpool.turns import Turns

PLACES = Placement(nodes={"a": "north", "b": "south", "c": "north"}, room={"north": 2, "south": 1})


def make(**options):
    limiter = AdaptiveLimiter(random=Random(0))
    return Replenisher(
        **{
            "targets": {},
            "cap": 10,
            "creates_in_flight": 10,
            "limiter": limiter,
            "placement": PLACES,
            **options,
        }
    )


def test_turns_are_kept_node_by_node():
    """The same order overall and on each node; what may be anywhere comes after what belongs on a node."""
    turns = Turns({"a": "north", "b": "south"})
    for image, count in (("x", 1), ("b", 1), ("a", 2)):
        turns.put(image, count)

    assert ("x", "a") == (turns.first(), turns.last())
    assert ["a", "b", "x", "x"] == [turns.first_on(node) for node in ("north", "south", "west", None)]
    assert "b" == turns.first(full={"north", None})
    assert ("a", "a", None) == (turns.first_of("north"), turns.last("north"), turns.last("west"))
    assert {"north": 2, "south": 1, None: 1} == turns.on
    assert turns.first(full={"north", "south", None}) is None
    assert [True, False, True, False] == [
        turns.suits(*pair) for pair in (("a", "north"), ("a", "south"), ("x", "south"), ("y", "south"))
    ]

    turns.take("x")
    turns.take("b")
    assert turns.first_on("south") is None
    assert "<Turns [2 of 1 images]>" == repr(turns)


def test_taking_turns_changes_the_order_on_the_node_too():
    """An image of which one was taken lets its neighbour have its turn."""
    turns = Turns({"a": "north", "c": "north"})
    turns.put("a", 2)
    turns.put("c", 1)

    turns.take("a")

    assert ("c", "c") == (turns.first(), turns.first_on("north"))
    assert "c" == turns.first(full={"south"})


def test_no_more_are_made_for_a_node_than_it_has_room_for():
    """Two go north and one south, whatever else is wanted there; when one is gone, the next is made."""
    replenisher = make(targets={"a": 2, "b": 2, "c": 2})
    for image in "abc":
        replenisher.update(image, Demand())

    made = replenisher.plan(0.0, alive=0, creating=0, going=0)

    assert [Make("a"), Make("b"), Make("c")] == made
    assert [] == replenisher.plan(0.0, alive=3, creating=3, going=0)

    replenisher.gone("c")
    assert [Make("a")] == replenisher.plan(0.0, alive=2, creating=2, going=0)


def test_what_has_no_place_is_made_whatever_is_full():
    """An image that may be anywhere is not held up by full nodes."""
    replenisher = make(targets={"a": 3, "x": 1})
    replenisher.update("a", Demand())
    replenisher.update("x", Demand())

    assert [Make("a"), Make("x"), Make("a")] == replenisher.plan(0.0, alive=0, creating=0, going=0)
    replenisher.gone("x")


def test_a_sandbox_becomes_what_belongs_where_it_is():
    """The image that comes up next is for another node: the next one that is not is taken."""
    replenisher = make()
    for image in "bac":
        replenisher.update(image, Demand(announced=1))

    assert "b" == replenisher.reuse("z")
    assert "a" == replenisher.reuse("z", "north")
    assert "c" == replenisher.reuse("c", "north")
    assert "b" == replenisher.reuse("c", "south")
    assert replenisher.reuse("z", "west") is None


def test_a_node_that_takes_nothing_holds_nobody_up():
    """Its images may be anywhere, whatever its room was, until it is back; what belongs elsewhere stays there."""
    replenisher = make(targets={"a": 3, "b": 1})
    replenisher.update("a", Demand())
    replenisher.update("b", Demand())
    assert [Make("a"), Make("b"), Make("a")] == replenisher.plan(0.0, alive=0, creating=0, going=0)
    replenisher.update("a", Demand(held=2, servable=1, waiting=1))
    replenisher.update("b", Demand(held=1))
    assert [] == replenisher.plan(0.0, alive=3, creating=0, going=0)
    assert replenisher.reuse("b", "south") is None

    replenisher.close("north")
    assert "a" == replenisher.reuse("b", "south") == replenisher.reuse("a", "south")
    assert [Make("a")] == replenisher.plan(0.0, alive=3, creating=0, going=0)

    replenisher.open("north")
    replenisher.update("a", Demand(held=3, servable=1, waiting=1))
    assert [] == replenisher.plan(0.0, alive=4, creating=0, going=0)
    assert replenisher.reuse("a", "south") is None


def test_who_waits_for_a_full_node_takes_nothing_of_another():
    """What is ready in the south cannot become what is waited for in the north, and stays."""
    replenisher = make(targets={"b": 1})
    replenisher.update("a", Demand(held=2, servable=2, waiting=2))
    for _ in range(2):
        replenisher._settle_on("a")
    replenisher.update("b", Demand(ready=1))

    assert [] == replenisher.plan(0.0, alive=3, creating=0, going=0)


def test_on_a_full_node_what_is_there_gives_way():
    """Stock first, then what is needed last; as much as is waited for, less what is going anyway."""
    places = Placement(nodes=dict.fromkeys("abcd", "north"), room={"north": 4})
    replenisher = make(targets={"b": 1}, placement=places)
    for image in "abcd":
        replenisher._settle_on(image)
    replenisher.update("a", Demand(held=1, servable=3, waiting=3))
    replenisher.update("b", Demand(ready=1))
    replenisher.update("c", Demand(ready=1, announced=1))
    replenisher.update("d", Demand(ready=1, announced=1))

    assert [] == replenisher.plan(0.0, alive=4, creating=0, going=3)
    assert [Evict("b"), Evict("d")] == replenisher.plan(0.0, alive=4, creating=0, going=1)


def test_on_a_full_node_stock_gives_way_to_what_is_announced():
    """And what is announced before does not."""
    places = Placement(nodes=dict.fromkeys("abc", "north"), room={"north": 2})
    replenisher = make(targets={"b": 1}, placement=places)
    for image in "bc":
        replenisher._settle_on(image)
    replenisher.update("b", Demand(ready=1))
    replenisher.update("c", Demand(ready=1, announced=1))
    replenisher.update("a", Demand(announced=2))

    assert [Evict("b")] == replenisher.plan(0.0, alive=2, creating=0, going=0)


def test_where_only_the_cap_is_in_the_way_anything_gives_way():
    """Of another node too: its place is free for a sandbox anywhere. Who waits for a full node is not counted."""
    replenisher = make(targets={"x": 2}, cap=3)
    replenisher._settle_on("b")
    replenisher.update("b", Demand(held=1, servable=2, waiting=2))
    replenisher.update("x", Demand(ready=2))
    replenisher.update("a", Demand(servable=1, waiting=1))

    assert [Evict("x")] == replenisher.plan(0.0, alive=3, creating=0, going=0)


def ready_book(images, nodes, **options):
    book = PoolBook(images={}, replenisher=make(**options))
    book.recycles = lambda _name: True
    book.node = lambda name: nodes[name]
    todo = book.start(0.0) + book.announce(Announcement(images), 0.0)
    while todo:
        decision = todo.pop(0)
        if isinstance(decision, Create):
            nodes[decision.name] = PLACES.nodes[decision.image]
            todo += book.created(decision.name, 0.0)
    return book


def test_a_released_sandbox_stays_on_its_node():
    """One of the south becomes nothing of the north, and goes if nothing of the south is wanted."""
    nodes: dict[str, str] = {}
    book = ready_book({"a": 2, "b": 1, "c": 1}, nodes)
    granted = []
    for image in ("a", "b"):
        waiter = Waiter(image, 1.0)
        book.request(waiter, 1.0)
        granted.append(waiter.grant)
    north, south = granted

    for grant in granted:
        book.release(grant, 2.0)

    assert [Recycle(north.name, "c")] == [d for d in book.decide(north.name, 2.0) if isinstance(d, Recycle)]
    assert [Destroy(south.name)] == book.decide(south.name, 2.0)


def test_what_makes_room_and_is_in_the_wrong_place_is_removed():
    """Stock of the south cannot become what is waited for in the north: it goes."""
    book = PoolBook(images={"b": 1, "a": 1}, replenisher=make(targets={"b": 1}, cap=1))
    book.recycles = lambda _name: True
    book.node = lambda _name: "south"
    (made,) = book.start(0.0)
    book.created(made.name, 0.0)

    waiter = Waiter("a", 1.0)
    decisions = book.request(waiter, 1.0)

    assert waiter.grant is None
    assert [Destroy(made.name)] == decisions
