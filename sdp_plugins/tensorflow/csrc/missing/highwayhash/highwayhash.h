// Of a header that TensorFlow's package lacks, what its other headers name: the member of a class
// that nothing here makes objects of.
#pragma once

namespace highwayhash {
template <int Target>
class HighwayHashCatT {};
}  // namespace highwayhash
