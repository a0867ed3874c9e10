// The states of a layer that mixes tokens by a recurrence, in the slots of its sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "attention.h"
#include "block_attention.h"
#include "scratch.h"

namespace quantkit {

// Sequences of a step, with the place of each one's states and whether it begins there: what the place holds counts as
// zeros then.
struct Sequence {
  Run rows;
  int64_t place;
  bool fresh;
};

// The sequences of a step's rows. Without a cache each has a place of its own.
inline std::vector<Sequence> sequences_of(const Rows& at, bool cached, bool prefill) {
  std::vector<Sequence> sequences;
  for (const Run& run : runs_of(at.slots, at.positions, at.batch, at.tokens)) {
    const int64_t place = cached ? run.slot : static_cast<int64_t>(sequences.size());
    sequences.push_back({run, place, prefill || at.positions[run.first] == 0});
  }
  return sequences;
}

// Call work(sequence, token, row) for each row of all sequences, on several threads where they are many.
template <class Work>
void each_token(const std::vector<Sequence>& sequences, int64_t rows, int threads, const Work& work) {
  std::vector<const Sequence*> of(rows);
  for (const Sequence& sequence : sequences)
    for (int64_t t = 0; t < sequence.rows.count; ++t) of[sequence.rows.first + t] = &sequence;
  each_row(rows, threads, [&](int64_t row) { work(*of[row], row - of[row]->rows.first, row); });
}

}  // namespace quantkit
