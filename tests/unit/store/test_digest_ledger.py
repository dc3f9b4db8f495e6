"""One reader hashes, the others rely on it; whoever leaves is replaced, and nothing outlives a rewritten arena."""

from __future__ import annotations

from paceline.store.channel_messages import DigestReply
from paceline.store.digest_ledger import DigestLedger

COMPUTE = DigestReply("compute")


def known(digest: str, by: str) -> DigestReply:
    return DigestReply("known", digest, by)


def wait(by: str) -> DigestReply:
    return DigestReply("wait", by=by)


def test_the_first_computes_and_all_others_get_its_digest() -> None:
    ledger = DigestLedger()
    assert ledger.ask(1, "r1", ("a", 7, "c"), "full") == [(1, COMPUTE)]
    assert ledger.ask(2, "r2", ("a", 7, "c"), "full") == [(2, wait("r1"))]
    assert ledger.ask(3, "r3", ("a", 7, "c"), "full") == [(3, wait("r1"))]
    assert ledger.report(1, "d") == [(2, known("d", "r1")), (3, known("d", "r1"))]
    assert ledger.ask(4, "r4", ("a", 7, "c"), "full") == [(4, known("d", "r1"))]
    ledger.gone(1)
    assert ledger.ask(5, "r5", ("a", 7, "c"), "full") == [(5, known("d", "r1"))]


def test_other_arenas_and_versions_are_other_questions() -> None:
    ledger = DigestLedger()
    ledger.ask(1, "r1", ("a", 7, "c"), "full")
    ledger.report(1, "d")
    assert ledger.ask(2, "r2", ("b", 7, "c"), "full") == [(2, COMPUTE)]
    assert ledger.ask(3, "r3", ("a", 8, "c"), "full") == [(3, COMPUTE)]


def test_who_was_told_something_else_of_the_bytes_hashes_for_itself() -> None:
    ledger = DigestLedger()
    ledger.ask(1, "r1", ("a", 7, "c"), "full")
    assert ledger.ask(2, "r2", ("a", 7, "other"), "full") == [(2, COMPUTE)]
    assert ledger.report(2, "lie") == []
    assert ledger.report(1, "d") == []
    assert ledger.ask(3, "r3", ("a", 7, "c"), "full") == [(3, known("d", "r1"))]


def test_a_partial_digest_does_not_answer_a_full_question() -> None:
    ledger = DigestLedger()
    assert ledger.ask(1, "r1", ("a", 7, "c"), "changed") == [(1, COMPUTE)]
    ledger.report(1, "d")
    assert ledger.ask(2, "r2", ("a", 7, "c"), "full") == [(2, COMPUTE)]
    ledger.report(2, "d")
    assert ledger.ask(3, "r3", ("a", 7, "c"), "full") == [(3, known("d", "r2"))]
    assert ledger.ask(4, "r4", ("a", 7, "c"), "changed") == [(4, known("d", "r2"))]


def test_who_leaves_while_it_computes_is_replaced_by_the_next() -> None:
    ledger = DigestLedger()
    for reader in (1, 2, 3):
        ledger.ask(reader, f"r{reader}", ("a", 7, "c"), "full")
    assert ledger.gone(1) == [(2, COMPUTE), (3, wait("r2"))]
    assert ledger.gone(2) == [(3, COMPUTE)]
    assert ledger.gone(3) == []
    assert ledger.ask(4, "r4", ("a", 7, "c"), "full") == [(4, COMPUTE)]


def test_who_leaves_while_it_waits_gets_nothing() -> None:
    ledger = DigestLedger()
    for reader in (1, 2):
        ledger.ask(reader, f"r{reader}", ("a", 7, "c"), "full")
    assert ledger.gone(2) == []
    assert ledger.report(1, "d") == []


def test_a_report_of_one_that_was_not_told_to_compute_is_ignored() -> None:
    ledger = DigestLedger()
    ledger.ask(1, "r1", ("a", 7, "c"), "full")
    ledger.ask(2, "r2", ("a", 7, "c"), "full")
    assert ledger.report(2, "lie") == []
    assert ledger.report(3, "lie") == []
    assert ledger.report(1, "d") == [(2, known("d", "r1"))]
    assert ledger.report(1, "other") == []
    assert ledger.ask(4, "r4", ("a", 7, "c"), "full") == [(4, known("d", "r1"))]


def test_a_rewritten_arena_is_forgotten() -> None:
    ledger = DigestLedger()
    ledger.ask(1, "r1", ("a", 7, "c"), "full")
    ledger.report(1, "d")
    ledger.forget("a")
    assert ledger.ask(2, "r2", ("a", 7, "c"), "full") == [(2, COMPUTE)]
