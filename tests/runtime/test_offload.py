"""Blocks on disk come back byte for byte or not at all, and nothing that happens to their folder stops the engine."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.runtime import block_files, offload
from octavo.runtime.block_files import HEADER_BYTES, MAX_WRITE_SECONDS, BlockFolder
from octavo.runtime.offload import DiskStore

BLOCK_BYTES = 5000
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
MODEL, OTHER_MODEL = bytes(range(32)), bytes(range(1, 33))


@contextmanager
def opened(folder: Path, *, num_blocks: float = 1000, fingerprint: bytes = MODEL, block_bytes: int = BLOCK_BYTES):
    """A store that holds `num_blocks` blocks at most."""
    store = DiskStore(folder, int(num_blocks * (HEADER_BYTES + block_bytes)), fingerprint, block_bytes)
    try:
        yield store
    finally:
        store.close()
        assert not store._writer.is_alive()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[DiskStore]:
    with opened(tmp_path) as store:
        yield store


def key(number: int) -> bytes:
    return hashlib.sha256(str(number).encode()).digest()


def payload(number: int) -> bytes:
    return hashlib.shake_128(str(number).encode()).digest(BLOCK_BYTES)


def keep(store: DiskStore, *numbers: int) -> None:
    """Put these blocks, in this order, and see them on the disk."""
    for number in numbers:
        store.put(key(number), payload(number))
        assert store.flush(10)


def kept(store: DiskStore) -> list[int]:
    """Which of the first 100 blocks there are."""
    return [number for number in range(100) if store.contains(key(number))]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if not path.is_dir())


def file_of(number: int, folder: Path, fingerprint: bytes = MODEL) -> Path:
    return Path(BlockFolder(folder, fingerprint, BLOCK_BYTES).path(key(number)))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# ── What was put comes back ──────────────────────────────────────────────────────────────────────────────────────────


def test_round_trip(store: DiskStore, tmp_path: Path) -> None:
    keep(store, 1, 2)
    assert store.contains(key(1)) and store.fetch(key(1)) == payload(1)
    assert store.fetch(key(2)) == payload(2)
    assert not store.contains(key(3)) and store.fetch(key(3)) is None
    assert (store.num_hits, store.num_misses, store.num_written, store.num_dropped) == (2, 1, 2, 0)
    assert store.counts == (2, 1, 2 * BLOCK_BYTES, 2 * BLOCK_BYTES, 0, 2 * FILE_BYTES)
    assert store.num_bytes == 2 * FILE_BYTES == sum(path.stat().st_size for path in files(tmp_path))


def test_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as first:
        first.put(key(1), payload(1))  # close waits for it
    with opened(tmp_path) as second:
        assert kept(second) == [1] and second.num_bytes == FILE_BYTES
        assert second.fetch(key(1)) == payload(1)


def test_layout_on_disk(store: DiskStore, tmp_path: Path) -> None:
    keep(store, 1)
    name = key(1).hex()
    path = tmp_path / MODEL.hex()[:16] / name[:2] / f"{name}.kv"
    data = path.read_bytes()
    fields = b"octavoKV" + (1).to_bytes(8, "little") + MODEL + key(1) + BLOCK_BYTES.to_bytes(8, "little")
    assert data == fields + hashlib.sha256(fields + payload(1)).digest() + payload(1)
    assert files(tmp_path) == [path]


def test_the_folder_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "a" / "b") as store:
        keep(store, 1)
    assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700


def test_a_known_block_is_not_written_again(store: DiskStore, tmp_path: Path) -> None:
    keep(store, 1)
    os.utime(file_of(1, tmp_path), ns=(10**18, 10**18))
    keep(store, 1)
    assert store.num_written == 1 and store.num_dropped == 0
    assert file_of(1, tmp_path).stat().st_mtime_ns > 10**18  # it counts as used


def test_blocks_of_a_wrong_size_are_refused(store: DiskStore) -> None:
    with pytest.raises(ValueError, match="payload has 3 bytes; a block has 5000"):
        store.put(key(1), b"abc")
    with pytest.raises(ValueError, match="content_hash has 3 bytes; it must have 32"):
        store.put(b"abc", payload(1))


# ── The queue ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No block is written before this event."""
    may_write, write = threading.Event(), BlockFolder.write

    def wait_and_write(*arguments) -> None:
        assert may_write.wait(10)
        write(*arguments)

    monkeypatch.setattr(BlockFolder, "write", wait_and_write)
    yield may_write
    may_write.set()


def test_put_never_waits_and_drops_what_the_queue_cannot_take(tmp_path, monkeypatch, slow_disk) -> None:
    monkeypatch.setattr(offload, "MAX_QUEUED_BYTES", 2 * BLOCK_BYTES + 1)
    with opened(tmp_path) as store:
        for number in range(5):
            store.put(key(number), payload(number))
        assert kept(store) == [0, 1] and store.num_dropped == 3
        assert store.fetch(key(1)) == payload(1)  # from the queue
        store.put(key(1), payload(1))
        assert not store.flush(0) and store.num_written == 0
        slow_disk.set()
        assert store.flush(10) and store.num_written == 2
        keep(store, 4)
        assert kept(store) == [0, 1, 4] and store.num_dropped == 3


def test_close_gives_up_on_a_disk_that_hangs(tmp_path, slow_disk) -> None:
    with opened(tmp_path) as store:
        store.put(key(1), payload(1))
        store.put(key(2), payload(2))
        closing = threading.Thread(target=store.close, args=(0,))
        closing.start()
        with store._changed:
            assert store._changed.wait_for(lambda: store._is_closed, 10)
        slow_disk.set()
        closing.join()
        assert (store.num_written, store.num_dropped) == (0, 2)


def test_a_closed_store_still_gives_blocks(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keep(store, 1)
        store.close()
        assert store.fetch(key(1)) == payload(1)
        store.put(key(1), payload(1))
        store.put(key(2), payload(2))
        assert store.flush(0) and store.num_dropped == 1 and not store.contains(key(2))


# ── Damage ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def flip(offset: int):
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x10
        path.write_bytes(data)

    return damage


def write_with(*, fingerprint: bytes = MODEL, number: int = 1, block_bytes: int = BLOCK_BYTES):
    """A sound file in the place of block 1, but not block 1 of MODEL."""

    def damage(path: Path) -> None:
        folder = BlockFolder(path.parents[2], fingerprint, block_bytes)
        folder.write(key(number), bytes(block_bytes), time.time_ns())
        os.replace(folder.path(key(number)), path)

    return damage


def replace_by(make):
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES = {
    "flipped magic": (flip(0), "not a KV block"),
    "flipped version": (flip(8), "version 17, not 1"),
    "flipped fingerprint": (flip(16), "another checkpoint"),
    "flipped content hash": (flip(79), "another block"),
    "flipped length": (flip(80), "its block has 5016 bytes, not 5000"),
    "flipped checksum": (flip(HEADER_BYTES - 1), "checksum"),
    "first bit of the payload": (flip(HEADER_BYTES), "checksum"),
    "last bit of the payload": (flip(FILE_BYTES - 1), "checksum"),
    "zeros for the payload": (
        lambda path: path.write_bytes(path.read_bytes()[:HEADER_BYTES] + bytes(5000)),
        "checksum",
    ),
    "cut by a byte": (lambda path: os.truncate(path, FILE_BYTES - 1), "cut short"),
    "cut in the header": (lambda path: os.truncate(path, HEADER_BYTES - 1), "cut short"),
    "empty": (lambda path: os.truncate(path, 0), "cut short"),
    "a byte too long": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "too long"),
    "of another model": (write_with(fingerprint=OTHER_MODEL), "another checkpoint"),
    "of other tokens": (write_with(number=3), "another block"),
    "of another size": (write_with(block_bytes=BLOCK_BYTES - 1), "its block has 4999 bytes, not 5000"),
    "a directory": (replace_by(os.mkdir), "directory"),
    "a pipe": (replace_by(os.mkfifo), "cut short"),
    "a link to nothing": (replace_by(lambda path: path.symlink_to(path)), "symbolic links"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_a_miss_and_goes(store: DiskStore, tmp_path: Path, caplog, name: str) -> None:
    damage, reason = DAMAGES[name]
    keep(store, 1, 2)
    path = file_of(1, tmp_path)
    damage(path)
    for _ in range(2):
        assert store.fetch(key(1)) is None
        assert not os.path.lexists(path) and kept(store) == [2]
    assert (store.num_hits, store.num_misses) == (0, 2)
    [message] = warnings(caplog)
    assert message.startswith(f"{path} is not used, and removed: ") and reason in message
    keep(store, 1)
    assert store.fetch(key(1)) == payload(1) and store.fetch(key(2)) == payload(2)


@pytest.mark.parametrize("name", DAMAGES)
def test_a_file_damaged_between_two_runs_is_a_miss(tmp_path: Path, caplog, name: str) -> None:
    with opened(tmp_path) as store:
        keep(store, 1, 2)
    DAMAGES[name][0](file_of(1, tmp_path))
    is_file = stat.S_ISREG(file_of(1, tmp_path).lstat().st_mode)
    with opened(tmp_path) as store:
        assert store.contains(key(1)) == is_file  # its content is looked at when it is wanted
        assert store.fetch(key(1)) is None and store.fetch(key(2)) == payload(2)
    assert len(warnings(caplog)) == is_file


def test_a_file_that_has_gone_is_a_silent_miss(store: DiskStore, tmp_path: Path, caplog) -> None:
    keep(store, 1)
    file_of(1, tmp_path).unlink()
    assert store.contains(key(1)) and store.fetch(key(1)) is None and not store.contains(key(1))
    assert store.num_misses == 1 and not warnings(caplog)


def test_a_folder_that_has_gone_is_made_again(store: DiskStore, tmp_path: Path, caplog) -> None:
    keep(store, 1)
    file_of(1, tmp_path).unlink()
    for folder in (file_of(1, tmp_path).parent, file_of(1, tmp_path).parents[1], tmp_path):
        folder.rmdir()
    assert store.fetch(key(1)) is None
    keep(store, 1)
    assert store.fetch(key(1)) == payload(1) and not warnings(caplog)


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path, caplog) -> None:
    path = file_of(1, tmp_path)
    path.mkdir(parents=True)
    (path / "letter").write_text("from somebody")
    with opened(tmp_path) as store:
        assert not store.contains(key(1))
        keep(store, 1, 2)
        assert kept(store) == [2] and (store.num_written, store.num_dropped) == (1, 1)
    assert len(warnings(caplog)) == 1 and files(tmp_path) == sorted([path / "letter", file_of(2, tmp_path)])


def test_files_without_our_names_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    strange = ("notes.txt", "0123456789abcdef/ab/readme", "0123456789abcdef/xyz/" + key(1).hex() + ".kv", ".x/ab/c.kv")
    for name in strange:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(10 * FILE_BYTES))
    with opened(tmp_path, num_blocks=2) as store:
        assert store.num_bytes == 0
        keep(store, 1, 2, 3)
        assert store.num_bytes == 2 * FILE_BYTES
    assert all((tmp_path / name).exists() for name in strange)


def test_leftovers_of_a_crash_are_removed_when_nobody_can_be_writing_them(tmp_path: Path) -> None:
    folder = tmp_path / MODEL.hex()[:16] / "ab"
    folder.mkdir(parents=True)
    old, new = folder / f".{1:032x}.tmp", folder / f".{2:032x}.tmp"
    for path, age in ((old, MAX_WRITE_SECONDS + 5), (new, 0)):
        path.write_bytes(bytes(7))
        os.utime(path, (time.time() - age, time.time() - age))
    with opened(tmp_path) as store:
        assert files(tmp_path) == [new] and store.num_bytes == 7


# ── The size limit ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_block_used_longest_ago_goes_first(tmp_path: Path) -> None:
    with opened(tmp_path, num_blocks=4) as store:
        keep(store, 0, 1, 2, 3)
        assert store.fetch(key(0)) == payload(0)
        keep(store, 1)  # put again
        keep(store, 4, 5)
        assert kept(store) == [0, 1, 4, 5] and store.num_bytes == 4 * FILE_BYTES
        keep(store, 6)
        assert kept(store) == [1, 4, 5, 6] and len(files(tmp_path)) == 4
        assert all(store.fetch(key(number)) == payload(number) for number in kept(store))
    assert store.num_dropped == 0


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path, num_blocks=4) as store:
        keep(store, 0, 1, 2, 3)
        store.fetch(key(0))
    with opened(tmp_path, num_blocks=4) as store:
        keep(store, 4)
        assert kept(store) == [0, 2, 3, 4]


def test_blocks_put_at_one_moment_keep_their_order(tmp_path: Path, monkeypatch) -> None:
    """The engine puts the tail of a chain before its head, and so it must go."""
    now = 1_800_000_000_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: now)
    with opened(tmp_path) as store:
        for number in range(4):
            store.put(key(number), payload(number))
        assert store.flush(10)
    assert [file_of(number, tmp_path).stat().st_mtime_ns - now for number in range(4)] == [0, 1, 2, 3]


def test_the_folder_is_scanned_once_for_many_blocks(tmp_path: Path, monkeypatch) -> None:
    scan, scans = BlockFolder.scan, []
    monkeypatch.setattr(BlockFolder, "scan", lambda folder: scans.append(1) or scan(folder))
    with opened(tmp_path, num_blocks=64) as store:
        keep(store, *range(60))  # at start, and before each fifth
    assert len(scans) == 15


def test_a_large_store_makes_room_for_many_at_once(tmp_path: Path) -> None:
    with opened(tmp_path, num_blocks=64) as store:
        keep(store, *range(65))  # a sixteenth of 64 is 4
        assert kept(store) == list(range(4, 65)) and store.num_bytes == 61 * FILE_BYTES


def test_a_smaller_limit_holds_from_the_start(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        keep(store, *range(8))
    with opened(tmp_path, num_blocks=5) as store:
        assert kept(store) == [4, 5, 6, 7] and store.num_bytes == 4 * FILE_BYTES


def test_the_limit_is_for_all_models_in_the_directory_and_empty_folders_go(tmp_path: Path) -> None:
    with opened(tmp_path, fingerprint=OTHER_MODEL) as other:
        keep(other, 0, 1, 2)
    with opened(tmp_path, num_blocks=4) as store:
        assert store.num_bytes == 3 * FILE_BYTES and kept(store) == []
        keep(store, *range(5))
        assert kept(store) == [1, 2, 3, 4]
    assert [path.name for path in tmp_path.iterdir()] == [MODEL.hex()[:16]]


def test_a_limit_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_offload_size is .* GiB; one KV block takes 5120 bytes") as error:
        DiskStore(tmp_path, FILE_BYTES - 1, MODEL, BLOCK_BYTES)
    assert error.value.param == "kv_offload_size"


# ── A disk that refuses ──────────────────────────────────────────────────────────────────────────────────────────────


def open_full(path: str, mode: str):
    """As `open`, but the disk has no room."""
    open(path, mode).close()
    return open("/dev/full", "wb")


def fail_with(number: int):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


REFUSALS = {
    "full while writing": (block_files, "open", open_full, "No space left"),
    "full at the end": (os, "replace", fail_with(errno.ENOSPC), "No space left"),
    "over the quota": (os, "replace", fail_with(errno.EDQUOT), "quota"),
    "read-only": (os, "replace", fail_with(errno.EROFS), "Read-only"),
    "not permitted": (os, "replace", fail_with(errno.EACCES), "Permission denied"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_disk_that_refuses_stops_the_writing_and_nothing_else(tmp_path, monkeypatch, caplog, name: str) -> None:
    owner, function, refuse, reason = REFUSALS[name]
    with opened(tmp_path) as store:
        keep(store, 1)
        monkeypatch.setattr(owner, function, refuse, raising=False)
        keep(store, 2)
        monkeypatch.undo()
        keep(store, 3)
        assert kept(store) == [1] and (store.num_written, store.num_dropped) == (1, 2)
        assert store.fetch(key(1)) == payload(1) and store.fetch(key(2)) is None
        assert files(tmp_path) == [file_of(1, tmp_path)], "the attempt has left something behind"
    assert len(warnings(caplog)) == 1 and "no KV block is written" in caplog.text and reason in caplog.text


def test_when_the_disk_refuses_all_that_waits_is_dropped(tmp_path, monkeypatch, slow_disk) -> None:
    monkeypatch.setattr(os, "replace", fail_with(errno.ENOSPC))
    with opened(tmp_path) as store:
        for number in range(3):
            store.put(key(number), payload(number))
        slow_disk.set()
        assert store.flush(10) and kept(store) == [] and store.num_dropped == 3


def test_a_file_in_the_folders_place_stops_the_writing(tmp_path, caplog) -> None:
    folder = tmp_path / "kv"
    with opened(folder) as store:
        folder.rmdir()
        folder.write_text("in the way")
        keep(store, 1, 2)
        assert store.num_dropped == 2 and len(warnings(caplog)) == 1


def test_old_files_that_cannot_be_removed_stop_the_writing(tmp_path, monkeypatch, caplog) -> None:
    with opened(tmp_path, num_blocks=2) as store:
        keep(store, 1, 2)
        monkeypatch.setattr(os, "unlink", fail_with(errno.EROFS))
        keep(store, 3)
        assert kept(store) == [1, 2] and store.num_bytes == 2 * FILE_BYTES
    assert len(warnings(caplog)) == 1 and "cannot be removed" in caplog.text


@pytest.mark.parametrize("below", ["", "kv"])
def test_a_directory_that_cannot_be_made_is_a_config_error(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"kv_offload_dir is '.*/file.*; it must be a folder") as error:
        DiskStore(tmp_path / "file" / below, 10**6, MODEL, BLOCK_BYTES)
    assert error.value.param == "kv_offload_dir"


# ── Several engines, one folder ──────────────────────────────────────────────────────────────────────────────────────


def test_two_engines_share_a_folder(tmp_path: Path) -> None:
    """One writes, the other learns of it with its next scan; what one removes, the other misses."""
    with opened(tmp_path, num_blocks=8) as first, opened(tmp_path, num_blocks=8) as second:
        keep(first, 0, 1, 2)
        keep(second, 0)  # the same block: written once more, and still one file
        assert kept(second) == [0] and len(files(tmp_path)) == 3
        keep(second, 3)  # scans, and so sees all
        assert kept(second) == [0, 1, 2, 3] and second.fetch(key(2)) == payload(2)
        keep(second, *range(10, 18))
        assert len(files(tmp_path)) <= 8
        assert first.contains(key(1)) and first.fetch(key(1)) is None
        assert first.fetch(key(17)) is None  # not known to the first yet


def test_engines_of_different_models_keep_apart(tmp_path: Path) -> None:
    with opened(tmp_path) as first, opened(tmp_path, fingerprint=OTHER_MODEL, block_bytes=64) as second:
        keep(first, 1)
        second.put(key(1), bytes(64))
        assert second.flush(10)
        assert first.fetch(key(1)) == payload(1) and second.fetch(key(1)) == bytes(64)


def test_many_at_once_on_a_folder_that_is_too_small(tmp_path: Path, caplog) -> None:
    """Three stores write, read and remove each other's files: every block that is found is the right one."""
    wrong: list[int] = []

    def play(store: DiskStore, first: int) -> None:
        for number in range(first, first + 120):
            store.put(key(number % 40), payload(number % 40))
            wanted = (number * 7) % 40
            found = store.fetch(key(wanted))
            if found is not None and found != payload(wanted):
                wrong.append(wanted)

    with (
        opened(tmp_path, num_blocks=20) as a,
        opened(tmp_path, num_blocks=20) as b,
        opened(tmp_path, num_blocks=20) as c,
    ):
        threads = [threading.Thread(target=play, args=(store, i * 13)) for i, store in enumerate((a, b, c))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(store.flush(10) for store in (a, b, c))
        assert not wrong and a.num_hits + b.num_hits + c.num_hits > 0
    assert not any("is not used" in message or "no KV block is written" in message for message in warnings(caplog))
    with opened(tmp_path, num_blocks=20) as store:
        assert all(store.fetch(key(number)) == payload(number) for number in kept(store))
