/*
 * The life of one block of a tier: who owns it, which tasks write and read it on each rank, what becomes of them when
 * processes die, and when it is given out again. It is a model of `fastdeploy_cache/books`, `movement` and `storage`,
 * and of `transfer_manager/process`. A block of the CPU tier is copied to and from the GPU by the ranks (client A), and
 * to and from a store by the storage processes (client B). A block of the GPU is copied by the ranks, and written by
 * the peer processes (client B).
 *
 * Checked as it is: every order of steps, with so many faults as the budgets below say. Each name in FAULTS brings a
 * known class of fault back: `-DFREE_AT_KILL` and so on. With -DREPLAY each step has to be the next one of a trace.
 *
 * What is left out: ids and tokens, the order of tasks in a lane, layers, time. What may be late may be late for ever.
 * FAULTS: SWITCH_EARLY FREE_AT_KILL FAIL_AS_OK LAND_OLD COMMIT_OLD NO_PIN NO_DEFER CANCEL_ENDS COUNT_TWICE ONE_FORGET
 *         ACCEPT_TORN FORGET_AT_REAP KEEP_QUEUE
 */
#ifndef RANKS
#define RANKS 2
#endif
#ifndef TASKS
#define TASKS 2
#endif

/* owners */
#define FREE 0
#define RUN 1     /* cached: a match may read it */
#define REQUEST 2 /* an engine computes it */
#define TASK 3    /* a task writes it; or it was freed while something still reads it */

/* a task: none, decided on, sent to ranks, answered by all, its block has gone to another owner */
#define NONE 0
#define PUT 1
#define FLIGHT 2
#define TOLD 3
#define GONE 4

/* a task on a rank */
#define UNSENT 0
#define SENT 1
#define WORKING 2
#define DONE 3     /* its answer is on the way, or will never be: the process may die before it sends it */
#define UNDONE 4
#define LOST 5     /* its process has been reaped, and the engine has read no answer */
#define READ 6     /* its answer has been read */

/* what the engine has heard of that */
#define NOTHING 0
#define OK 1
#define BAD 2

/* a process; one that is killed may run on for a moment */
#define UP 0
#define KILLED 1
#define DEAD 2
#define DOWN 3

#define NOBODY TASKS
#define A 0
#define B 1

typedef Job {
    byte phase;
    bit writes;
    bit client;
    bit doomed;  /* what it brings is of a time before a reset, or a loss; or nobody wants what it reads */
    bit stale;   /* it reads, and the block was given to somebody else meanwhile */
    byte waiting; /* ranks of which the engine has heard nothing */
    byte at[RANKS], heard[RANKS];
};

#ifdef REPLAY
#include "trace.pml"
int pos;
#else
bit is_gpu;
byte num_takes, num_puts, num_deaths, num_forgets;
#endif
byte owner, writer = NOBODY;
bit old;          /* what is in it is of a time before a reset, or a loss */
bit good[RANKS];  /* the rank's part holds what the owner thinks */
Job job[TASKS];
byte life[2 * RANKS];
bit split;        /* ranks have new KV arrays, and the engine still computes on the old ones */
bit gone;         /* the engine has died */
bit whole, torn;  /* an object in the store */

/* what must never be so; each is 1 for a moment only, before the search ends */
bit wrong_byte, foreign_write, read_of_another, left_behind;

#include "sizes.pml"

#define process(c, r) life[(c) * RANKS + (r)]
#define runs(c, r) (process(c, r) <= KILLED)
#define READS(t) (job[t].phase != NONE && job[t].phase != GONE && !job[t].writes)
#define READS_PINNED(t) (READS(t) && job[t].client == A && !job[t].doomed)
#define GOOD(r) good[r]
#define LIVES_A(r) (process(A, r) == UP)

#define OK_AT(t, r) (job[t].heard[r] == OK)
#define RUNS_AT(t, r) ((job[t].at[r] == SENT || job[t].at[r] == WORKING))
#define DOWN_AT(t, r) (process(job[t].client, r) == DOWN)
#define ALL_OK(t) ALL_RANKS_OF(OK_AT, t)
#define ONE_OK(t) ANY_RANK_OF(OK_AT, t)
#define STILL_RUNS(t) ANY_RANK_OF(RUNS_AT, t)
#define REACHABLE(t) !ANY_RANK_OF(DOWN_AT, t)

#ifdef REPLAY
#define on(event, first, second) c_expr { trace[now.pos] == event * 64 + first * 8 + second } &&
#define next c_code { taken[now.pos] = 1; }; pos++;
#define budget(number, most) true
#define spend(number)
#define is_gpu 0
#define IS_FOR_GPU true
#else
#define on(event, first, second)
#define next
#define budget(number, most) number < most
#define IS_FOR_GPU !is_gpu
#define spend(number) number++;
#endif
#ifndef MAX_TAKES
#define MAX_TAKES 3
#define MAX_PUTS 4
#define MAX_DEATHS 2
#define MAX_FORGETS 1
#endif

/* ---- what steps do; inline, as no macro may be used within itself */
#define WRITES_ELSEWHERE(t, r) (job[t].phase != NONE && job[t].writes && job[t].at[r] == WORKING \
    && runs(job[t].client, r) && !(owner == TASK && writer == t))
#define ELSEWHERE(t) ANY_RANK_OF(WRITES_ELSEWHERE, t)
#define CHECK check();
inline check() {
    wrong_byte = owner == RUN && !old && !ALL(GOOD);
    assert(!wrong_byte);
    foreign_write = ANY_TASK(ELSEWHERE);
    assert(!foreign_write);
    next
}
#define SPOIL_ONE(r) good[r] = 0;
#define RENEW_ONE(r) good[r] = 1;
inline spoil() { EACH_RANK(SPOIL_ONE) }
inline renew() { EACH_RANK(RENEW_ONE) }
#define OUTDATE_ONE(t) if :: READS(t) -> job[t].stale = 1; :: else fi;
inline outdate() { EACH_TASK(OUTDATE_ONE) }
#define DOOM(t) if :: job[t].phase != NONE && job[t].writes && writer == t -> job[t].doomed = 1; :: else fi;
inline forget() {
    spoil();
    if :: owner == RUN || owner == REQUEST -> old = 1; :: else fi;
    EACH_TASK(DOOM)
}
#define UNSEND(t, r) job[t].at[r] = UNSENT; job[t].heard[r] = NOTHING;
/* A task that is over is forgotten, unless a rank is still at it, as only a fault can bring about. */
inline tidy(t) {
    if :: job[t].phase == GONE && !STILL_RUNS(t) ->
        job[t].phase = NONE; job[t].writes = 0; job[t].client = 0; job[t].doomed = 0; job[t].stale = 0;
        job[t].waiting = 0; EACH_RANK_OF(UNSEND, t)
    :: else fi
}
/* Each rank is heard once. */
inline note(t, r, what) {
    if :: job[t].phase == FLIGHT && job[t].heard[r] == NOTHING -> job[t].heard[r] = what;
        if :: job[t].waiting > 0 -> job[t].waiting--; :: else fi
       :: else fi
}
inline drop(t) { job[t].phase = GONE; tidy(t) }

#ifdef FAIL_AS_OK
#define COUNTS(t) true
#elif defined(SWITCH_EARLY)
#define COUNTS(t) ONE_OK(t)
#else
#define COUNTS(t) ALL_OK(t)
#endif
#ifdef LAND_OLD
#define IS_CURRENT(t) true
#else
#define IS_CURRENT(t) !job[t].doomed
#endif
#ifdef SWITCH_EARLY
#define HAS_ENDED(t) (job[t].waiting == 0 || ONE_OK(t))
#else
#define HAS_ENDED(t) (job[t].waiting == 0)
#endif
#ifdef COMMIT_OLD
#define MAY_COMMIT true
#else
#define MAY_COMMIT !old
#endif
#define READS_UNPINNED(t) (READS(t) && job[t].client == B)
#ifdef NO_PIN
#define MAY_EVICT true
#define IS_READ ANY_TASK(READS_UNPINNED)
#else
#define MAY_EVICT !ANY_TASK(READS_PINNED)
#define READS_FOR_SOMEBODY(t) (READS(t) && !(job[t].client == A && job[t].doomed))
#define IS_READ ANY_TASK(READS_FOR_SOMEBODY)
#endif
#ifdef NO_DEFER
#define MAY_REUSE true
#else
#define MAY_REUSE !IS_READ
#endif

#ifdef FORGET_AT_REAP
#define IS_OUT(t, r) (job[t].at[r] == UNSENT)
#elif defined(KEEP_QUEUE)
#define IS_OUT(t, r) (job[t].at[r] == UNSENT || job[t].at[r] == LOST \
    || (job[t].at[r] == SENT && process(job[t].client, r) == DOWN))
#else
#define IS_OUT(t, r) (job[t].at[r] == UNSENT || job[t].at[r] == LOST)
#endif

/* ---- one rank of a task: first what the engine does, then what the process does */
#define RANK_STEPS(t, r) \
:: atomic { on(SENT_TO, t, r) !gone && job[t].phase == FLIGHT && job[t].at[r] == UNSENT \
            && job[t].heard[r] == NOTHING \
            && process(job[t].client, r) != DOWN -> \
    job[t].at[r] = SENT; CHECK } \
:: atomic { on(UNREACHED, t, r) !gone && job[t].phase == FLIGHT && job[t].heard[r] == NOTHING && IS_OUT(t, r) -> \
    note(t, r, BAD); CHECK } \
:: atomic { on(HEARD_OK, t, r) !gone && job[t].at[r] == DONE -> job[t].at[r] = READ; note(t, r, OK); CHECK } \
:: atomic { on(HEARD_BAD, t, r) !gone && job[t].at[r] == UNDONE -> job[t].at[r] = READ; note(t, r, BAD); CHECK } \
:: atomic { on(BEGUN, t, r) job[t].at[r] == SENT && runs(job[t].client, r) -> \
    job[t].at[r] = WORKING; \
    if :: job[t].writes -> good[r] = 0; :: else fi; \
    CHECK } \
:: atomic { on(LEFT_OUT, t, r) job[t].at[r] == SENT && runs(job[t].client, r) -> \
    job[t].at[r] = UNDONE; tidy(t); CHECK } \
:: atomic { on(FINISHED, t, r) job[t].at[r] == WORKING && runs(job[t].client, r) && MAY_FINISH(t) -> \
    job[t].at[r] = DONE; \
    if :: job[t].writes -> good[r] = !job[t].doomed && writer == t && owner == TASK && BRINGS_GOOD(t); \
       :: else -> SHOW_OBJECT(t, r) fi; \
    tidy(t); CHECK } \
:: atomic { on(FAILED, t, r) job[t].at[r] == WORKING && runs(job[t].client, r) -> \
    job[t].at[r] = UNDONE; tidy(t); CHECK }

/* ---- a store: what client B reads of a block of the CPU tier goes there, and comes from there */
#ifdef REPLAY
#define MAY_FINISH(t) true
#define BRINGS_GOOD(t) true
#define SHOW_OBJECT(t, r) skip;
#define TEAR(t, r)
#else
#ifdef ACCEPT_TORN
#define MAY_FINISH(t) (is_gpu || job[t].client == A || !job[t].writes || whole || torn)
#else
#define MAY_FINISH(t) (is_gpu || job[t].client == A || !job[t].writes || whole)
#endif
#define BRINGS_GOOD(t) (is_gpu || job[t].client == A || whole)
#define SHOW_OBJECT(t, r) \
    if :: !is_gpu && job[t].client == B -> whole = 1; torn = 0; :: else fi; \
    read_of_another = job[t].stale && job[t].client == B; \
    assert(!read_of_another);
#define TEAR(t, r) \
    if :: job[t].at[r] == WORKING && !job[t].writes && job[t].client == B && !is_gpu && !whole -> \
        torn = 1; :: else fi;
#endif

/* ---- a task */
#define TASK_STEPS(t) \
:: atomic { on(PUT_WRITE, t, A) !gone && job[t].phase == NONE && owner == TASK && writer == NOBODY && !IS_READ \
            && budget(num_puts, MAX_PUTS) -> \
    job[t].phase = PUT; job[t].writes = 1; job[t].client = A; writer = t; spend(num_puts) CHECK } \
:: atomic { on(PUT_WRITE, t, B) !gone && job[t].phase == NONE && owner == TASK && writer == NOBODY && !IS_READ \
            && budget(num_puts, MAX_PUTS) -> \
    job[t].phase = PUT; job[t].writes = 1; job[t].client = B; writer = t; spend(num_puts) CHECK } \
:: atomic { on(PUT_READ, t, A) !gone && job[t].phase == NONE && (owner == RUN || owner == REQUEST) && !old \
            && budget(num_puts, MAX_PUTS) -> \
    job[t].phase = PUT; job[t].client = A; spend(num_puts) CHECK } \
:: atomic { on(PUT_READ, t, B) !gone && job[t].phase == NONE && owner == RUN && !old && !is_gpu \
            && budget(num_puts, MAX_PUTS) -> \
    job[t].phase = PUT; job[t].client = B; spend(num_puts) CHECK } \
:: atomic { on(REFUSED, t, 0) !gone && job[t].phase == PUT -> \
    job[t].phase = TOLD; \
    if :: !job[t].writes -> drop(t); :: else fi; \
    CHECK } \
:: atomic { on(ADDED, t, 0) !gone && job[t].phase == PUT && REACHABLE(t) && !(split && job[t].client == A) -> \
    job[t].phase = FLIGHT; job[t].waiting = RANKS; CHECK } \
:: atomic { on(ENDED, t, 0) !gone && job[t].phase == FLIGHT && HAS_ENDED(t) -> \
    job[t].phase = TOLD; \
    if :: !job[t].writes -> \
        read_of_another = job[t].stale && !job[t].doomed && ALL_OK(t); \
        assert(!read_of_another); \
        drop(t); \
    :: else fi; \
    CHECK } \
:: atomic { on(HANDED, TASK, RUN) !gone && owner == TASK && writer == t && job[t].phase == TOLD && COUNTS(t) \
            && IS_CURRENT(t) -> \
    owner = RUN; writer = NOBODY; drop(t); CHECK } \
:: atomic { on(HANDED, TASK, REQUEST) !gone && owner == TASK && writer == t && job[t].phase == TOLD && COUNTS(t) -> \
    owner = REQUEST; old = job[t].doomed; writer = NOBODY; drop(t); CHECK } \
:: atomic { on(FREED, TASK, 0) !gone && owner == TASK && writer == t && job[t].phase == TOLD -> \
    owner = FREE; old = 0; spoil(); writer = NOBODY; drop(t); CHECK } \
:: atomic { on(UNWANTED, t, 0) !gone && READS_PINNED(t) && IS_FOR_GPU && budget(num_forgets, MAX_FORGETS) -> \
    job[t].doomed = 1; spend(num_forgets) CHECK } \
EACH_RANK_OF(RANK_STEPS, t) \
CANCEL_STEP(t)

#ifdef CANCEL_ENDS
#define CANCEL_STEP(t) :: atomic { !gone && job[t].phase == FLIGHT -> \
    job[t].phase = TOLD; \
    if :: !job[t].writes -> drop(t); :: else fi; \
    CHECK }
#else
#define CANCEL_STEP(t)
#endif

/* ---- a process */
#ifdef KEEP_QUEUE
#define ENDS_WITH_IT(t, r) (job[t].at[r] > SENT && job[t].at[r] <= UNDONE)
#else
#define ENDS_WITH_IT(t, r) (job[t].at[r] >= SENT && job[t].at[r] <= UNDONE)
#endif
#define LOSE(c, t, r) \
    if :: job[t].phase != NONE && job[t].client == c && ENDS_WITH_IT(t, r) -> job[t].at[r] = LOST; tidy(t); \
       :: COUNT_AGAIN(c, t, r) :: else fi;
#ifdef COUNT_TWICE
#define COUNT_AGAIN(c, t, r) \
    job[t].phase == FLIGHT && job[t].client == c && job[t].heard[r] != NOTHING && job[t].waiting -> job[t].waiting--;
#else
#define COUNT_AGAIN(c, t, r) false -> skip;
#endif
#ifdef FREE_AT_KILL
#define ANSWER_FOR(c, t, r) \
    if :: job[t].client == c && RUNS_AT(t, r) -> note(t, r, BAD); :: else fi;
#else
#define ANSWER_FOR(c, t, r)
#endif
#ifdef REPLAY
#define KILL_STEP(c, r)
#define LOSE_ARRAYS(c, r)
#else
#define KILL_STEP(c, r) \
:: atomic { !gone && process(c, r) == UP && budget(num_deaths, MAX_DEATHS) -> \
    process(c, r) = KILLED; spend(num_deaths) ANSWER_FOR_ALL(c, r) CHECK }
/* The KV arrays of a dead rank are gone with it: the engine forgets the GPU now, and once more when it is told of the
   new ones, since it goes on computing in between. */
#define LOSE_ARRAYS(c, r) if :: is_gpu && c == A -> split = 1; forget(); :: else fi;
#endif
#define PROCESS_STEPS(c, r) \
KILL_STEP(c, r) \
:: atomic { on(DIED, c, r) (process(c, r) == KILLED || (process(c, r) == UP && (gone || DIES_BY_ITSELF))) -> \
    if :: process(c, r) == UP && !gone -> spend(num_deaths) :: else fi; \
    process(c, r) = DEAD; TEAR_ALL(r) CHECK } \
:: atomic { on(REAPED, c, r) !gone && process(c, r) == DEAD -> \
    process(c, r) = DOWN; LOSE_ALL(c, r) LOSE_ARRAYS(c, r) CHECK } \
:: atomic { on(STARTED, c, r) !gone && process(c, r) == DOWN -> process(c, r) = UP; CHECK }
#define DIES_BY_ITSELF budget(num_deaths, MAX_DEATHS)
#define PROCESS_STEPS_A(r) PROCESS_STEPS(A, r)
#define PROCESS_STEPS_B(r) PROCESS_STEPS(B, r)

#ifdef ONE_FORGET
#define FORGET_AGAIN spoil();
#else
#define FORGET_AGAIN forget();
#endif

init {
#ifdef REPLAY
    c_code { read_traces(); };
    do
    :: c_expr { now.pos == 0 || trace[now.pos - 1] == 0 } -> break
    :: c_expr { now.pos + 1 < num_steps } -> pos++
    od;
#else
    if :: is_gpu = 0; :: is_gpu = 1; fi;
#endif
    do
    /* the books */
    :: atomic { on(TAKE, REQUEST, 0) !gone && owner == FREE && budget(num_takes, MAX_TAKES) -> /* it is computed */
        owner = REQUEST; renew(); outdate(); spend(num_takes) CHECK }
    :: atomic { on(TAKE, TASK, 0) !gone && owner == FREE && budget(num_takes, MAX_TAKES) ->
        owner = TASK; outdate(); spend(num_takes) CHECK }
    :: atomic { on(HANDED, REQUEST, RUN) !gone && owner == REQUEST && MAY_COMMIT -> owner = RUN; old = 0; CHECK }
    :: atomic { on(FREED, RUN, 0) !gone && owner == RUN && MAY_EVICT && MAY_REUSE ->
        owner = FREE; old = 0; spoil(); CHECK }
    :: atomic { on(FREED, REQUEST, 0) !gone && owner == REQUEST && MAY_REUSE && MAY_EVICT ->
        owner = FREE; old = 0; spoil(); CHECK }
    :: atomic { on(HANDED, REQUEST, TASK) !gone && owner == REQUEST && MAY_EVICT -> /* another instance reads it */
        owner = TASK; old = 0; spoil(); CHECK }
    :: atomic { on(HANDED, RUN, TASK) !gone && owner == RUN && MAY_EVICT ->
        owner = TASK; old = 0; spoil(); CHECK }
    :: atomic { on(FREED, TASK, 0) !gone && owner == TASK && writer == NOBODY && MAY_REUSE ->
        owner = FREE; old = 0; spoil(); CHECK }
    :: atomic { on(FORGOT, 0, 0) !gone && budget(num_forgets, MAX_FORGETS) -> forget(); spend(num_forgets) CHECK }
#ifdef REPLAY
    :: atomic { on(HANDED, RUN, REQUEST) owner == RUN && MAY_EVICT -> owner = REQUEST; CHECK } /* memory ran out */
    :: atomic { on(0, 0, 0) true -> next break }
#else
    :: atomic { !gone && split && ALL(LIVES_A) -> spoil(); FORGET_AGAIN split = 0; CHECK }
    :: atomic { !gone && num_deaths < MAX_DEATHS -> gone = 1; CHECK }
    :: atomic { timeout ->
        left_behind = !gone && (owner != FREE || ANY_TASK(READS) || writer != NOBODY);
        assert(!left_behind);
        break }
#endif
    EACH_RANK(PROCESS_STEPS_A)
    EACH_RANK(PROCESS_STEPS_B)
    EACH_TASK(TASK_STEPS)
    od
}
