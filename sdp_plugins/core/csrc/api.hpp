// Implements sdp_api.h.
#pragma once

#include <functional>
#include <memory>

#include "../include/sdp_api.h"
#include "engine.hpp"

// Never freed, because compiled graphs may hold its address forever. It holds the engine weakly.
struct SdpEndpoint {
  std::function<std::shared_ptr<sdp::Work>(sdp::Request)> submit;  // throws sdp::Failure
};

namespace sdp {

SdpEndpoint* make_endpoint(const std::shared_ptr<Engine>& engine);

const SdpApi* api();
}  // namespace sdp
