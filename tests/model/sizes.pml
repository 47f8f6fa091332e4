/* Something for each rank, and for each task, of the numbers that RANKS and TASKS say: 1 to 3, and 2 or 8. */
#if RANKS == 1
#define ALL(what) (what(0))
#define EACH_RANK(what) what(0)
#define EACH_RANK_OF(what, t) what(t, 0)
#define ANY_RANK_OF(what, t) what(t, 0)
#define ALL_RANKS_OF(what, t) what(t, 0)
#elif RANKS == 2
#define ALL(what) (what(0) && what(1))
#define EACH_RANK(what) what(0) what(1)
#define EACH_RANK_OF(what, t) what(t, 0) what(t, 1)
#define ANY_RANK_OF(what, t) (what(t, 0) || what(t, 1))
#define ALL_RANKS_OF(what, t) (what(t, 0) && what(t, 1))
#else
#define ALL(what) (what(0) && what(1) && what(2))
#define EACH_RANK(what) what(0) what(1) what(2)
#define EACH_RANK_OF(what, t) what(t, 0) what(t, 1) what(t, 2)
#define ANY_RANK_OF(what, t) (what(t, 0) || what(t, 1) || what(t, 2))
#define ALL_RANKS_OF(what, t) (what(t, 0) && what(t, 1) && what(t, 2))
#endif
#if TASKS == 2
#define ANY_TASK(what) (what(0) || what(1))
#define EACH_TASK(what) what(0) what(1)
#else
#define ANY_TASK(what) (what(0) || what(1) || what(2) || what(3) || what(4) || what(5) || what(6) || what(7))
#define EACH_TASK(what) what(0) what(1) what(2) what(3) what(4) what(5) what(6) what(7)
#endif
#if TASKS == 2
#define LOSE_ALL(c, r) LOSE(c, 0, r) LOSE(c, 1, r)
#define TEAR_ALL(r) TEAR(0, r) TEAR(1, r)
#define ANSWER_FOR_ALL(c, r) ANSWER_FOR(c, 0, r) ANSWER_FOR(c, 1, r)
#else
#define LOSE_ALL(c, r) LOSE(c, 0, r) LOSE(c, 1, r) LOSE(c, 2, r) LOSE(c, 3, r) LOSE(c, 4, r) LOSE(c, 5, r) \
    LOSE(c, 6, r) LOSE(c, 7, r)
#define TEAR_ALL(r)
#endif
