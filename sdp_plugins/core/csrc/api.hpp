// Implements sdp_api.h.
#pragma once

#include <functional>
#include <memory>

#include "../include/sdp_api.h"
#include "engine.hpp"

// Never freed, because compiled graphs may hold its address forever. It holds the engine weakly.
struct SdpEndpoint {
  std::function<void(sdp::Request)> run;  // both throw sdp::Failure
  std::function<std::shared_ptr<sdp::Work>(sdp::Request)> submit;
};

namespace sdp {

SdpEndpoint* make_endpoint(const std::shared_ptr<Engine>& engine);
// For a group whose operations do not run in a native engine.
SdpEndpoint* make_endpoint(std::function<std::shared_ptr<Work>(Request)> submit);

const SdpApi* api();
}  // namespace sdp
