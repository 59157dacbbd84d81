// What stands behind sdp_api.h.
#pragma once

#include <functional>
#include <memory>

#include "../include/sdp_api.h"
#include "engine.hpp"

// Never freed: compiled graphs hold its address for as long as they please. What it leads to is
// held weakly.
struct SdpEndpoint {
  std::function<void(sdp::Request)> run;  // both throw sdp::Failure
  std::function<std::shared_ptr<sdp::Work>(sdp::Request)> submit;
};

namespace sdp {

SdpEndpoint* make_endpoint(const std::shared_ptr<Engine>& engine);
// Of a group whose operations are not an engine's.
SdpEndpoint* make_endpoint(std::function<std::shared_ptr<Work>(Request)> submit);

const SdpApi* api();
}  // namespace sdp
