// Which tensor goes into which fusion buffer, over many random models.
#include <algorithm>
#include <map>
#include <random>

#include "check.hpp"
#include "fusion_plan.hpp"
#include "segment.hpp"

using namespace sdp;

namespace {
struct Model {
  std::vector<TensorSpec> tensors;
  std::size_t threshold;
  std::size_t nbytes(std::size_t i) const { return tensors[i].count * itemsize(tensors[i].dtype); }
  std::size_t nbytes(const FusionPlan::Bucket& bucket) const {
    std::size_t sum = 0;
    for (std::size_t tensor : bucket.tensors) sum += nbytes(tensor);
    return sum;
  }
};

std::vector<Model> random_models() {
  std::mt19937 random(7);
  const auto up_to = [&](std::size_t most) {
    return std::uniform_int_distribution<std::size_t>(0, most)(random);
  };
  std::vector<Model> models;
  for (int i = 0; i < 2000; ++i) {
    Model model;
    model.threshold = kAlign * (1 + up_to(40));
    const std::size_t n_types = 1 + up_to(2);
    const std::size_t n_tensors = up_to(30);
    for (std::size_t t = 0; t < n_tensors; ++t) {
      const auto dtype = static_cast<DType>(up_to(n_types - 1) * 3 % kDTypes);
      const std::size_t most = (up_to(9) == 0 ? 3 : 1) * model.threshold / itemsize(dtype);
      model.tensors.push_back({up_to(9) == 0 ? 0 : up_to(most), dtype});
    }
    models.push_back(model);
  }
  return models;
}

template <class Body>  // body(model, plan)
void for_all_models(Body&& body) {
  for (const Model& model : random_models()) {
    body(model, FusionPlan(model.tensors, model.threshold));
  }
}
}  // namespace

TEST(every_tensor_is_in_exactly_one_bucket_and_knows_it) {
  for_all_models([](const Model& model, const FusionPlan& plan) {
    std::vector<int> seen(model.tensors.size());
    for (std::size_t b = 0; b < plan.buckets().size(); ++b) {
      const auto& bucket = plan.buckets()[b];
      CHECK(!bucket.tensors.empty());
      for (std::size_t tensor : bucket.tensors) {
        ++seen[tensor];
        CHECK_EQ(plan.bucket_of(tensor), b);
        CHECK(model.tensors[tensor].dtype == bucket.dtype);
      }
    }
    for (int times : seen) CHECK_EQ(times, 1);
  });
}

TEST(tensors_keep_their_order_and_buckets_leave_by_their_last_tensor) {
  for_all_models([](const Model&, const FusionPlan& plan) {
    std::map<DType, std::size_t> last_of_type;
    std::size_t last = 0;
    for (const auto& bucket : plan.buckets()) {
      CHECK(std::is_sorted(bucket.tensors.begin(), bucket.tensors.end()));
      CHECK(bucket.tensors.back() >= last);
      last = bucket.tensors.back();
      // A type's tensors fill its buckets one after the other.
      const auto before = last_of_type.find(bucket.dtype);
      CHECK(before == last_of_type.end() || bucket.tensors.front() > before->second);
      last_of_type[bucket.dtype] = bucket.tensors.back();
    }
  });
}

TEST(buckets_hold_at_most_the_threshold_or_one_large_tensor) {
  for_all_models([](const Model& model, const FusionPlan& plan) {
    for (const auto& bucket : plan.buckets()) {
      CHECK_EQ(bucket.count * itemsize(bucket.dtype), model.nbytes(bucket));
      CHECK(model.nbytes(bucket) <= model.threshold || bucket.tensors.size() == 1);
      // What is full waits for nothing, not even for a tensor without elements.
      CHECK(model.nbytes(bucket) < model.threshold || model.nbytes(bucket.tensors.back()) > 0);
    }
  });
}

TEST(large_tensors_are_alone) {
  for_all_models([](const Model& model, const FusionPlan& plan) {
    for (std::size_t tensor = 0; tensor < model.tensors.size(); ++tensor) {
      if (model.nbytes(tensor) < model.threshold) continue;
      // What has no elements may be beside one that is just as large as the threshold.
      CHECK_EQ(model.nbytes(plan.buckets()[plan.bucket_of(tensor)]), model.nbytes(tensor));
    }
  });
}

TEST(a_bucket_is_only_sealed_when_full_or_for_want_of_room) {
  for_all_models([](const Model& model, const FusionPlan& plan) {
    std::map<DType, const FusionPlan::Bucket*> previous;
    for (const auto& bucket : plan.buckets()) {
      const auto*& before = previous[bucket.dtype];
      if (before != nullptr && model.nbytes(*before) < model.threshold) {
        CHECK(model.nbytes(*before) + model.nbytes(bucket.tensors[0]) > model.threshold);
      }
      before = &bucket;
    }
  });
}

TEST(the_plan_depends_on_order_sizes_and_types_only) {
  for_all_models([](const Model& model, const FusionPlan& plan) {
    const FusionPlan again(model.tensors, model.threshold);
    CHECK_EQ(again.buckets().size(), plan.buckets().size());
    for (std::size_t b = 0; b < plan.buckets().size(); ++b) {
      CHECK(again.buckets()[b].tensors == plan.buckets()[b].tensors);
      CHECK(again.buckets()[b].dtype == plan.buckets()[b].dtype);
      CHECK_EQ(again.buckets()[b].count, plan.buckets()[b].count);
      CHECK_EQ(again.buckets()[b].layout, plan.buckets()[b].layout);
    }
  });
}

TEST(no_tensors_make_no_buckets) {
  CHECK(FusionPlan({}, 128).buckets().empty());
}

TEST(thresholds_are_positive_multiples_of_128) {
  for (std::size_t threshold : {0, 1, 127, 129, 25'000'000}) {
    CHECK_THROWS(FusionPlan({}, threshold), std::invalid_argument, "multiple of 128");
  }
}
