/* Steps of the real code, as a story has written them down, one trace for each block; see traces.py. */
/* events of a trace: number, and what its two numbers are. A client and a rank are one number. */
#define TAKE 1      /* owner */
#define FREED 2     /* owner before */
#define HANDED 3    /* owner before, owner after; to a task, if something reads it that does not pin it */
#define FORGOT 5
#define PUT_WRITE 6 /* task, client */
#define PUT_READ 7  /* task, client */
#define REFUSED 8   /* task */
#define ADDED 9     /* task */
#define BEGUN 10    /* task, rank */
#define LEFT_OUT 11 /* task, rank */
#define FINISHED 12 /* task, rank */
#define FAILED 13   /* task, rank */
#define HEARD_OK 14 /* task, rank */
#define HEARD_BAD 15 /* task, rank */
#define UNREACHED 16 /* task, rank: the engine answers for it */
#define ENDED 17    /* task */
#define DIED 18     /* client, rank */
#define REAPED 19   /* client, rank */
#define STARTED 20  /* client, rank */
#define SENT_TO 22   /* task, rank */
#define UNWANTED 21 /* task: what it reads is for nobody, as its destination has been forgotten */

/* The traces of `traces.bin`, each up to a 0, and a byte for each step that could be taken, in `taken.bin`. */
c_code {
static int *trace, num_steps;
static char *taken;
static void write_taken(void) {
    FILE *file = fopen("taken.bin", "wb");
    if (file) { fwrite(taken, 1, num_steps, file); fclose(file); }
}
static void read_traces(void) {
    FILE *file;
    if (trace) return;
    file = fopen("traces.bin", "rb");
    if (!file) exit(3);
    fseek(file, 0, SEEK_END);
    num_steps = ftell(file) / sizeof(int);
    rewind(file);
    trace = malloc(num_steps * sizeof(int));
    taken = calloc(num_steps, 1);
    if (!trace || !taken || fread(trace, sizeof(int), num_steps, file) != num_steps) exit(3);
    fclose(file);
    atexit(write_taken);
}
};
