// all_reduce and reduce differ only in the ranks that keep the result.
//
// The three paths give the same bits (one tree, see reduction_tree.hpp). Large buffers are divided
// into N equal shards, and rank r is the server of shard r, as in SMDDP's balanced fusion buffers:
// every rank reads and writes the same number of bytes.
#include <algorithm>
#include <cstring>
#include <span>

#include "../reduction_tree.hpp"
#include "../shards.hpp"
#include "collectives.hpp"
#include "one_hop.hpp"
#include "piece_list.hpp"

namespace sdp {
namespace {

class AllReduce {
 public:
  AllReduce(Operation& op, bool keeps)
      : op_(op),
        keeps_(keeps),
        item_(op.itemsize()),
        pieces_(op.request().recvs),
        buffer_(pieces_, item_) {}

  void run() {
    const std::size_t nbytes = buffer_.count() * item_;
    if (travels_inline(nbytes)) return small();
    if (announce(nbytes)) {
      zero_copy();
    } else {
      staged();
    }
  }

 private:
  Reducer reducer() const {
    return Reducer(op_.request().dtype, op_.request().reduce_op, op_.factors());
  }
  Shards shards() const { return {buffer_.count(), op_.world_size(), kAlign / item_}; }
  void copy(std::byte* to, const std::byte* from, std::size_t n) const {
    std::memcpy(to, from, n * item_);
  }

  void small() {
    if (pieces_.size() == 1) return inlined(pieces_[0]);
    std::byte flat[kInlineBytes];
    const Range all{0, buffer_.count()};
    buffer_.each(all, [&](std::byte* data, std::size_t n, std::size_t done) {
      copy(flat + done * item_, data, n);
    });
    inlined({flat, buffer_.count()});
    if (!keeps_) return;
    buffer_.each(all, [&](std::byte* data, std::size_t n, std::size_t done) {
      copy(data, flat + done * item_, n);
    });
  }

  // Every rank reads all payloads and reduces them itself: one synchronization.
  void inlined(const Piece& buffer) {
    OneHop hop(op_, {&buffer, 1});
    if (!keeps_ || buffer.count == 0) return;
    std::vector<const std::byte*> sources;
    for (int r = 0; r < op_.world_size(); ++r) sources.push_back(hop.part(r, 0, 0).data);
    reducer().run(sources, {&buffer.data, 1}, buffer.count);
  }

  // Announces the place of the buffer; returns whether all ranks' buffers can be mapped.
  bool announce(std::size_t nbytes) {
    Announcement announcement = op_.announcement();
    op_.announce_memory(announcement, pieces_);
    op_.arrive(announcement);

    bool all_registered = true;
    for (int r = 0; r < op_.world_size(); ++r) {
      all_registered = all_registered && op_.announced(r).runs != 0;
    }
    const Path path = choose_path(op_.request().op, false, nbytes, all_registered);
    op_.set_path(path);
    return path == Path::zero_copy;
  }

  // Rank r alone reads and writes shard r, in all ranks' memory: the ranks synchronize only at the
  // beginning and at the end.
  void zero_copy() {
    const Range mine = shards().shard(op_.rank());
    std::vector<std::vector<Piece>> memory(static_cast<std::size_t>(op_.world_size()));
    std::vector<PieceList> buffers;
    for (int r = 0; r < op_.world_size(); ++r) {
      auto& pieces = memory[static_cast<std::size_t>(r)];
      if (r != op_.rank()) pieces = op_.memory_of(r, buffer_.count());
      buffers.push_back(r == op_.rank() ? buffer_ : PieceList(pieces, item_));
    }
    const auto reduce = [&](Range part) {
      reduce_in_place(buffers, {mine.begin + part.begin, part.count});
    };
    op_.access_peer_memory([&] { op_.divide(mine.count, reduce); });
    op_.publish();
    op_.await_all();
  }

  // The ranks' buffers may be cut at different elements.
  void reduce_in_place(std::span<const PieceList> buffers, Range range) const {
    Reducer reducer = this->reducer();
    std::vector<std::byte*> outputs(buffers.size());
    std::vector<const std::byte*> sources(buffers.size());
    for (std::size_t done = 0; done < range.count;) {
      std::size_t n = range.count - done;
      for (std::size_t r = 0; r < buffers.size(); ++r) {
        const Piece run = buffers[r].from(range.begin + done);
        sources[r] = outputs[r] = run.data;
        n = std::min(n, run.count);
      }
      reducer.run(sources, outputs, n);
      done += n;
    }
  }

  // In each round: shows the parts that other ranks serve, reduces this rank's part from all ranks,
  // fetches the others' results. A slot holds one piece per rank: piece d for server d, and the
  // server's result in its own piece.
  void staged() {
    const Shards shards = this->shards();
    const std::size_t chunk = op_.slot_bytes() / static_cast<std::size_t>(op_.world_size()) / item_;
    const std::size_t piece_bytes = chunk * item_;
    const int me = op_.rank();
    const int world = op_.world_size();
    Reducer reducer = this->reducer();
    std::vector<const std::byte*> sources(static_cast<std::size_t>(world));
    const auto piece = [&](int rank, int index, std::size_t round, std::size_t done) {
      return op_.segment(rank).slot(round) + static_cast<std::size_t>(index) * piece_bytes +
             done * item_;
    };
    const auto show = [&](std::size_t round) {
      for (int d = 0; d < world; ++d) {
        if (d == me) continue;
        buffer_.each(shards.chunk(d, round, chunk),
                     [&](std::byte* data, std::size_t n, std::size_t done) {
                       copy(piece(me, d, round, done), data, n);
                     });
      }
    };
    const auto serve = [&](std::size_t round) {
      buffer_.each(
          shards.chunk(me, round, chunk), [&](std::byte* data, std::size_t n, std::size_t done) {
            for (int r = 0; r < world; ++r) {
              sources[static_cast<std::size_t>(r)] = r == me ? data : piece(r, me, round, done);
            }
            std::byte* result = piece(me, me, round, done);
            std::byte* const outputs[] = {keeps_ ? data : result, result};
            reducer.run(sources, outputs, n);
          });
    };
    const auto fetch = [&](std::size_t round) {
      for (int d = 0; keeps_ && d < world; ++d) {
        if (d == me) continue;
        buffer_.each(shards.chunk(d, round, chunk),
                     [&](std::byte* data, std::size_t n, std::size_t done) {
                       copy(data, piece(d, d, round, done), n);
                     });
      }
    };
    op_.lockstep(shards.rounds(chunk), show, serve, fetch);
  }

  Operation& op_;
  bool keeps_;
  std::size_t item_;
  std::span<const Piece> pieces_;
  PieceList buffer_;
};
}  // namespace

void all_reduce(Operation& op) {
  AllReduce(op, true).run();
}
void reduce(Operation& op) {
  AllReduce(op, op.rank() == op.request().root).run();
}
}  // namespace sdp
