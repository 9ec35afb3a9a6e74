"""Micro-batches made anew: which rows can stand together, and which are left out."""

import torch

from grpo_cli.fast import batches
from grpo_cli.fast.batches import can_repack, has_signal


def make_micro_batches(window, *, trim=True, **options):
    on_host = batches.read_window(window)
    return batches.make_micro_batches(window, on_host, trim=trim, **options)


def rows(advantages, lengths, **more):
    """Rows of one prompt each, with 2 tokens of prompt and up to 3 of completion."""
    count = len(advantages)
    return {
        "prompt_ids": torch.arange(2 * count).view(count, 2),
        "prompt_mask": torch.ones(count, 2, dtype=torch.long),
        "completion_ids": torch.ones(count, 3, dtype=torch.long),
        "completion_mask": (torch.arange(3) < torch.tensor(lengths)[:, None]).long(),
        "advantages": torch.tensor(advantages),
        "num_items_in_batch": torch.tensor(5),
        **more,
    }


def test_rows_without_signal_or_without_tokens_are_left_out():
    window = [rows([0.0, 1.0], [3, 3]), rows([-1.0, 2.0], [0, 2])]
    assert [has_signal(batch).tolist() for batch in window] == [[False, True], [False, True]]
    (made,) = make_micro_batches(window, loss_type="dapo", leave_out=True, share=True, budget=100)
    assert sorted(made["advantages"].tolist()) == [1.0, 2.0]
    whole = make_micro_batches(window, loss_type="dapo", leave_out=False, share=True, budget=100)
    assert sum(batch.size for batch in whole) == 3


def test_nothing_is_made_where_nothing_is_learned():
    window = [rows([0.0, 0.0], [3, 3])]
    assert (
        make_micro_batches(window, loss_type="dapo", leave_out=True, share=True, budget=None) == []
    )


def test_what_has_not_one_value_a_row_stays_as_it_came():
    """Pictures: as many patches as there are, whatever rows they belong to."""
    window = [rows([0.0, 1.0], [3, 3], pixel_values=torch.zeros(7, 4))]
    assert not can_repack(window)
    (made,) = make_micro_batches(window, loss_type="grpo", leave_out=True, share=True, budget=1)
    assert made.size == 2
    assert made.scale == 1.0
    assert torch.equal(made["pixel_values"], window[0]["pixel_values"])
    assert not can_repack([rows([1.0], [3], images=["a picture"])])


def test_the_scale_of_a_mean_over_rows_is_that_of_the_rows_it_has():
    window = [rows([1.0, 0.0, 2.0, 0.0], [3, 3, 3, 3])]
    (made,) = make_micro_batches(window, loss_type="grpo", leave_out=True, share=True, budget=100)
    assert (made.size, made.scale) == (2, 0.5)


def test_rows_that_are_padded_are_packed_with_their_padding():
    window = [rows([1.0, 2.0], [1, 3]), rows([3.0, 4.0], [1, 1])]
    made = make_micro_batches(window, loss_type="dapo", leave_out=True, share=False, budget=6)
    assert sorted(sorted(batch["advantages"].tolist()) for batch in made) == [
        [1.0, 3.0],
        [2.0],
        [4.0],
    ]


def test_rows_for_other_processes_add_nothing_and_divide_by_nothing():
    old = torch.full((2, 3), -200.0)
    (made,) = make_micro_batches(
        [rows([1.0, 2.0], [3, 3], old_per_token_logps=old)],
        loss_type="dapo",
        leave_out=True,
        share=True,
        budget=None,
    )
    made.fill_up(4)
    assert made.size == 4
    assert made["old_per_token_logps"][2:].eq(0).all()
    assert made["old_per_token_logps"][:2].eq(-200).all()
    assert made["completion_mask"][2:].eq(0).all()


def test_padding_that_stays_counts_for_the_budget():
    window = [rows([1.0] * 4, [1, 1, 1, 1])]
    window[0]["prompt_mask"][:, 0] = 0
    sizes = {}
    for trim in (True, False):
        made = make_micro_batches(
            window, loss_type="dapo", leave_out=True, share=False, budget=8, trim=trim
        )
        sizes[trim] = sorted(batch.size for batch in made)
    # A row is read as 1 + 1 or 2 + 3 tokens.
    assert sizes == {True: [4], False: [1, 1, 1, 1]}
