"""The picture of requests and blocks: whose each block is, how many share it, and who is in which phase."""

from __future__ import annotations

from array import array

from octavo.core.picture import Painter, Phase, Picture
from octavo.request import BeamSearchParams
from support.fake_runner import make_beams, make_engine, make_request


def tables(picture: Picture) -> list[tuple[int, list[int]]]:
    return [(number, ids(table)) for number, table in picture.tables]


def ids(data: bytes) -> list[int]:
    return array("i", data).tolist()


def phases(picture: Picture) -> list[tuple[int, Phase]]:
    return [(each.number, each.phase) for each in picture.requests]


def test_nothing_runs():
    picture = make_engine(num_blocks=3).picture()
    assert picture.requests == [] and tables(picture) == [] and ids(picture.cached) == []
    assert (picture.num_waiting, picture.num_prefill, picture.num_decode) == (0, 0, 0)


def test_a_request_from_the_queue_to_its_end():
    engine = make_engine(num_blocks=6, block_size=4, max_num_batched_tokens=8)
    engine.add_request(make_request("a", [1] * 11, max_tokens=4, ignore_eos=True))
    picture = engine.picture()
    assert phases(picture) == [(0, Phase.WAITING)] and picture.num_waiting == 1
    engine.step()
    picture = engine.picture()
    assert picture.requests == [(1, "prefill", 11, 0, 8, 0)] and picture.num_prefill == 1
    assert tables(picture) == [(1, [0, 1, 2])] and ids(picture.cached) == []
    engine.step()
    picture = engine.picture()
    assert picture.requests == [(1, "decode", 11, 1, 11, 0)] and picture.num_decode == 1
    while engine.has_unfinished:
        engine.step()
    picture = engine.picture()
    assert picture.requests == [] and tables(picture) == [] and sorted(ids(picture.cached)) == [0, 1, 2, 3]


def test_who_came_first_comes_first():
    engine = make_engine(num_blocks=8, block_size=4)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.add_request(make_request("a", prompt, max_tokens=9, ignore_eos=True))
    engine.step()
    engine.add_request(make_request("b", [*prompt[:8], 3], max_tokens=9, ignore_eos=True))
    engine.step()
    assert tables(engine.picture()) == [(1, [0, 1, 2]), (2, [0, 1, 3])]


def test_a_number_stays_and_is_given_again_when_it_is_free():
    engine = make_engine()
    for request_id in "abc":
        engine.add_request(make_request(request_id, [ord(request_id) - 96] * 3, max_tokens=40, ignore_eos=True))
    engine.step()
    assert [each.number for each in engine.picture().requests] == [1, 2, 3]
    engine.abort(["b"])
    assert [each.number for each in engine.picture().requests] == [1, 3]
    engine.add_request(make_request("d", [4] * 3, max_tokens=40, ignore_eos=True))
    engine.step()
    assert [each.number for each in engine.picture().requests] == [1, 3, 2]


def test_who_is_preempted_waits_again_and_is_computed_again():
    engine = make_engine(num_blocks=6, block_size=4, enable_prefix_caching=False)
    for request_id in "ab":
        engine.add_request(make_request(request_id, [1] * 7, max_tokens=12, ignore_eos=True))
    while not engine.scheduler.num_preemptions:
        engine.step()
    picture = engine.picture()
    assert phases(picture) == [(1, Phase.DECODE), (0, Phase.WAITING)]
    assert picture.requests[1].num_preemptions == 1 and picture.requests[1].num_output_tokens > 0
    assert [number for number, _ in tables(picture)] == [1]


def test_the_blocks_of_all_beams_are_the_request_s():
    engine = make_engine(num_blocks=32, block_size=4)
    engine.add_request(make_beams("a", [1, 2, 3, 4, 5], BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)))
    for _ in range(3):
        engine.step()
    picture = engine.picture()
    assert phases(picture) == [(1, Phase.DECODE)] and picture.requests[0].num_output_tokens == 3
    beams = engine.scheduler.rows.all(engine.scheduler.running[0])
    assert tables(picture) == [(1, engine.scheduler.kv.block_table(beam).tolist()) for beam in beams]
    assert len({table[0] for _, table in tables(picture)}) == 1 and len(beams) == 3


def test_many_requests_are_counted_and_some_are_shown():
    engine = make_engine(max_num_seqs=2)
    for i in range(300):
        engine.add_request(make_request(f"r{i}", [1, 2], max_tokens=9, ignore_eos=True))
    engine.step()
    picture = engine.picture()
    assert len(picture.requests) == 256 and picture.num_waiting == 298


def test_taking_pictures_changes_nothing():
    engine = make_engine(num_blocks=6, block_size=4)
    engine.add_request(make_request("a", [1] * 7, max_tokens=12, ignore_eos=True))
    painter = Painter(engine.scheduler)
    while engine.has_unfinished:
        engine.step()
        assert painter.paint() == painter.paint()
        engine.check_integrity()
