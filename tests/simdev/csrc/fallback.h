// Which operators did not run asynchronously.
#pragma once

#include <string>

namespace simdev {

std::string synchronous_ops();  // one a line

}  // namespace simdev
