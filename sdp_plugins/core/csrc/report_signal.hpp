// The signal on which a process reports what its ranks wait for. Its handler may interrupt the
// program anywhere, so it only wakes a thread that waits for a file descriptor.
#pragma once

namespace sdp {

// Installs the handler, unless the program has its own or ignores the signal; returns whether it
// was installed. The handler writes to the eventfd; in a forked child it takes the default action.
bool take_report_signal(int number, int eventfd);
// Restores the default action, unless another handler was installed meanwhile.
void give_back_report_signal(int number);
}  // namespace sdp
