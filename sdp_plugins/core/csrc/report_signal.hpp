// The signal at which a process shows what its ranks wait for. Its handler only wakes a thread that
// waits for the descriptor: it runs wherever the signal has interrupted the program.
#pragma once

namespace sdp {

// Takes the signal, unless somebody has a handler for it or ignores it; whether it was taken. What
// comes writes to the eventfd; in a forked child it does what it does without a handler.
bool take_report_signal(int number, int eventfd);
// Gives it back, unless somebody else has taken it since.
void give_back_report_signal(int number);
}  // namespace sdp
