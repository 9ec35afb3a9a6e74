"""Rows packed into micro-batches: each once, within the budget, prompts paid for once."""

from hypothesis import given
from hypothesis import strategies as st

from grpo_cli.train.fast.packing import pack_rows

GROUPS = st.lists(
    st.tuples(st.integers(1, 50), st.lists(st.integers(1, 60), min_size=1, max_size=8)),
    min_size=1,
    max_size=8,
)


def pack(groups, budget):
    prompts, lengths, rows = [], [], []
    for prompt, own in groups:
        rows.append(list(range(len(lengths), len(lengths) + len(own))))
        lengths += own
        prompts += [prompt] * len(own)
    return pack_rows(rows, prompts, lengths, budget), rows, prompts, lengths


@given(GROUPS, st.integers(1, 400))
def test_every_row_is_in_one_pack_that_fits(groups, budget):
    packs, rows, prompts, lengths = pack(groups, budget)
    assert sorted(row for found in packs for row in found.rows) == list(range(len(lengths)))
    for found in packs:
        shared = sum(prompts[group[0]] for group in rows if not set(group).isdisjoint(found.rows))
        tokens = shared + sum(lengths[row] - 1 for row in found.rows)
        # Pieces of one group that meet again are counted with a prompt each.
        assert tokens <= found.tokens
        assert found.tokens <= budget or len(found.rows) == 1


@given(GROUPS)
def test_one_pack_where_all_fits(groups):
    whole = sum(prompt + sum(own) for prompt, own in groups)
    packs, _, _, _ = pack(groups, whole)
    assert len(packs) == 1


def test_the_longest_come_first_and_a_group_stays_together():
    packs, _, _, _ = pack([(10, [5, 5]), (10, [41, 31]), (10, [6, 4])], 80)
    assert [found.rows for found in packs] == [[2, 3], [4, 5, 0, 1]]
    assert [found.tokens for found in packs] == [80, 36]


def test_a_group_too_large_is_cut():
    packs, _, _, _ = pack([(10, [11, 11, 11])], 30)
    assert [found.rows for found in packs] == [[0, 1], [2]]
