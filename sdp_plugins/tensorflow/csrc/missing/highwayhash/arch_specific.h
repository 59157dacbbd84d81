// Of a header that TensorFlow's package lacks, what its other headers name. See highwayhash.h.
#pragma once
#define HH_TARGET_PREFERRED 0
